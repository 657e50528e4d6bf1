"""Kinds of experiment: what a plan may say, how its rows are found, what its numbers are, how it is drawn."""
