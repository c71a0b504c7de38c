"""The kernels in C for every set of instructions that this processor has."""

from smart_embedder.models.ops.native import load_library, runnable_here

LIBRARIES = [library for each in runnable_here() if (library := load_library(each)) is not None]
