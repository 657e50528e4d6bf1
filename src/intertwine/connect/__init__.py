"""Connecting networks: the straight line between two of them, what it costs to walk it, and how to mend the middle."""
