"""Triton kernels for measures on a GPU; imported only where triton is installed."""
