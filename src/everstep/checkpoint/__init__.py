"""Checkpoints: when to save, how, and how to get one back (docs/checkpoints.md)."""
