"""Stitching: the front of one network, a map from a small family, and the back of another."""
