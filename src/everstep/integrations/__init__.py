"""Autosave for training loops that others run: Lightning and the transformers Trainer."""
