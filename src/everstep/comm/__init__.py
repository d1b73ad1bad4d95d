"""The data plane: channels between pairs of workers and groups of them, each for one generation."""
