"""The systems compared, one file each. `registry.py` lists them."""
