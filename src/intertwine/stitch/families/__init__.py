"""Families of maps between two networks. A module in this folder adds families by registering them."""
