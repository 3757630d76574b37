"""Triton kernels for what PyTorch would do in several passes. Import only where there is a GPU."""
