"""The kernels in C for every instruction set of this processor, and activations."""

from functools import partial

import pytest
from torch.nn import functional

from smart_embedder.kernels.build import library_path
from smart_embedder.kernels.native import Library, runnable_instruction_sets

PATH = library_path()
LIBRARIES = [Library(str(PATH), name) for name in runnable_instruction_sets() if PATH.exists()]
needs_kernels = pytest.mark.skipif(not LIBRARIES, reason="the kernels are not built")
# The functions of PyTorch, by the names of transformers.
ACTIVATIONS = {
    None: lambda states: states,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}
