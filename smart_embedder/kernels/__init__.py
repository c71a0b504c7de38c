"""Backends that compute the operations of a model's layers: PyTorch, oneDNN, kernels in C and CUDA.

The kernels in C run on Linux, on x86-64 processors with AVX2 and on ARM processors with dot
products. `build` compiles them. Without them PyTorch's operators compute the same results.
"""
