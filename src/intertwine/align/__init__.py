"""Alignment: the element of the symmetry that brings one network as near to another as it can."""
