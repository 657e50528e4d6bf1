"""Reproduce: the tables and figures of the five papers, one plan each, next to the printed numbers."""
