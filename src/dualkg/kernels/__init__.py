"""Loops that PyTorch's operations would take several passes for: numba on a CPU, Triton on a GPU.

Kernels know arrays alone. Each has a plain form in PyTorch beside its caller, which is what runs where the compiler
is missing, and what the kernel is tested against.
"""
