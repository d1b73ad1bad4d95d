"""Worker processes on one node: a warm parent to fork them from, an agent to look after them."""
