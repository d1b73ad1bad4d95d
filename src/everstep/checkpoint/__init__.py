"""Checkpoints: when to take them, how to take them without stopping, and how to come back."""
