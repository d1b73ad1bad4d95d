"""Brings survivors and replacements to one agreed step, by the cheapest exact way there is."""
