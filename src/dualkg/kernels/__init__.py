"""Compiled kernels: numba on a CPU, Triton on a GPU, for operations that take PyTorch several passes.

Kernels work on arrays alone. Each has a form in plain PyTorch, which runs without a compiler and which tests compare
the kernel with.
"""
