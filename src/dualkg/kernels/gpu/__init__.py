"""Triton kernels, each with the function that launches it."""
