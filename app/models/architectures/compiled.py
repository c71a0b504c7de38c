"""TORCH_COMPILE: a model's layers through PyTorch's compiler, once for all numbers of tokens.

It fuses the operations between the matrix products. Attention is not compiled, since its shapes
are new in every batch. On a CPU there is little to fuse, and the kernels in C are not read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from app.errors import StartupError
from app.models.architectures.transformer import Transformer
from app.models.attention.reference import Attention

Model = TypeVar("Model", bound=Transformer)


def compile_layers(transformer: Model) -> Model:
    """The same transformer, each layer of which is compiled at its first forward."""
    layers: Any = transformer.layers
    compiled: Any = [torch.compile(layer.__call__, dynamic=True) for layer in layers]
    attend: Attention = torch.compiler.disable(transformer.attend)  # type: ignore[no-untyped-call]
    return replace(transformer, layers=compiled, attend=attend)


@contextmanager
def compiler_errors_as_startup_errors() -> Iterator[None]:
    """Turn a compiler's failure within into a `StartupError` that says what to do."""
    try:
        yield
    except RuntimeError as error:
        # Their base class stands in a module that takes a second to import and may not be needed.
        if not any("TorchDynamoException" in each.__name__ for each in type(error).__mro__):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StartupError(
            f"PyTorch cannot compile the model: {reason}; TORCH_COMPILE=true needs a C++ compiler "
            "and, on a GPU, Triton: install them, or set it to false"
        ) from error
