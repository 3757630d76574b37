"""Compiled kernels of arrays: numba on a CPU, Triton on a GPU, each with a plain form in PyTorch to
compare with.
"""
