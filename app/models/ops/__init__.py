"""Kernels of this service's own, in C: attention, and the passes over rows between two products.

They are for Linux on x86-64 processors with AVX2 or more, and on ARM's with dot products (`build`
makes them); everywhere else, and where they are not built, PyTorch's operators do the same work.
"""
