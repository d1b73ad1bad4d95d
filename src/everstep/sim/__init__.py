"""Clusters in virtual time: training jobs over failure traces, systems side by side. No torch."""
