"""Checkpoints: when to save (pure), how to save without stopping, and how to come back exactly."""
