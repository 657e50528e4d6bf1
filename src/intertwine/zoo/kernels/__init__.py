"""Triton kernels for stacks of networks on a GPU; imported only where triton is installed."""
