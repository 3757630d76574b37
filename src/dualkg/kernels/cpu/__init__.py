"""numba kernels, run by as many threads as PyTorch uses."""
