"""Folding: features of a layer that are the same, or nearly, merged into one; and how many different ones there are."""
