"""Backends: the operations of a model's layers, by PyTorch, oneDNN, and kernels in C and CUDA.

The kernels in C are for Linux on x86-64 processors with AVX2 and on ARM with dot products. `build`
builds them; elsewhere, and where they are not built, PyTorch's operators compute the same.
"""
