"""TORCH_COMPILE: a model's layers through PyTorch's compiler, once for all numbers of tokens.

It fuses what lies between the matrix products. Attention stays as it is, since its shapes are new
in every batch. On a CPU little is left to fuse, and it cannot read the kernels in C.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from app.errors import StartupError
from app.models.architectures.bert.encoder import Encoder
from app.models.architectures.qwen3.decoder import Decoder
from app.models.attention.choose import Kernel

Transformer = TypeVar("Transformer", Encoder, Decoder)


def compile_layers(transformer: Transformer) -> Transformer:
    """The same transformer, each layer of which is compiled at its first forward."""
    layers: Any = [_compile(layer) for layer in transformer.layers]
    return replace(transformer, layers=layers, kernel=_leave_out(transformer.kernel))


def _leave_out(kernel: Kernel) -> Kernel:
    """The kernel as the compiler must not look into it."""
    apart: Kernel = torch.compiler.disable(kernel)  # type: ignore[no-untyped-call]
    return apart


def _compile(layer: Any) -> Any:
    return torch.compile(layer.__call__, dynamic=True)


@contextmanager
def explained() -> Iterator[None]:
    """Turn a compiler's failure within into a `StartupError` that says what to do."""
    try:
        yield
    except Exception as error:
        # Their base class stands in a module that takes a second to import and may not be needed.
        if not any("TorchDynamoException" in each.__name__ for each in type(error).__mro__):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StartupError(
            f"PyTorch cannot compile the model: {reason}; TORCH_COMPILE=true needs a C++ compiler "
            "and, on a GPU, Triton: install them, or set it to false"
        ) from error
