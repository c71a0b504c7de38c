"""TORCH_COMPILE: a model's layers through PyTorch's compiler.

It fuses what lies between the matrix products. Attention stays as it is, since its shapes are new
in every batch; the encoder that bge-m3 has on a CPU (`app.models.encoder`) leaves nothing to fuse
that would be worth it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from app.errors import StartupError


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each layer of `model` at its first forward, once for all numbers of tokens."""
    name = model.config._attn_implementation  # noqa: SLF001 - transformers has no other name for it
    attention = AttentionInterface()[name]
    apart = torch.compiler.disable(attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(name, apart)
    parts: Any = model
    layers = parts.encoder.layer if hasattr(parts, "encoder") else parts.layers
    for layer in layers:
        layer.compile(dynamic=True)


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
