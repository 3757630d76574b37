"""Compiled kernels of arrays: numba on a CPU, Triton on a GPU, and plain forms in PyTorch."""
