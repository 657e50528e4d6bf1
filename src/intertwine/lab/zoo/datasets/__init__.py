"""Data sets as tensors: found in a folder, checked against their published sums, the same from every layout."""
