"""Executes plans: cuts the model into stages, runs their F, B and W, feeds them with data."""
