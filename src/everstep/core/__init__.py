"""Ids, clocks, events and errors: what every room shares. Standard library only."""
