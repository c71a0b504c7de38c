"""The interface of the operations of a model's layers, and the choice of a backend.

Each model has one backend for its device and dtype. `TorchBackend` defines the operations and is
the reference in tests; the others override operations that they compute faster. A new device or a
fused kernel is a new module in this folder and a line in `_fastest`.

No row of a result depends on the other rows of its batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from app.models.attention.dense import Attention
from app.models.attention.packed import require_runs
from app.models.ops.cuda import CudaBackend, FusedCudaBackend, load_kernels
from app.models.ops.native import FORMATS, NativeBackend, load_library
from app.models.ops.torch_backend import (
    AddLinear,
    Columns,
    Int8Gemm,
    LayerNorm,
    Linear,
    OneDnnBackend,
    QuantizedRows,
    QuantizedWeights,
    RmsNorm,
    RotaryEmbedding,
    TorchBackend,
)


class Backend(Protocol):
    """Computes the operations of one model's layers.

    `attention` is the name of `attend`. `int8_weight_limit` is the largest absolute value of a
    weight for which `int8_gemm` is exact.
    """

    attention: str
    attend: Attention
    int8_weight_limit: int

    def linear(self, layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
        """Prepare `activation(x W + b)` of layers that read the same x, side by side."""

    def add_linear(self, layer: nn.Linear) -> AddLinear:
        """Prepare the sum of `x W` and a residual, which may be overwritten."""

    def embed(
        self, indices: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], norm: LayerNorm
    ) -> Tensor:
        """The norm of the sum of rows of two tables, `[T, width]`; their `indices` are int64."""

    def add_norm(self, states: Tensor, residual: Tensor, norm: LayerNorm) -> Tensor:
        """The norm of the sum of two `[T, width]`; `states` may be overwritten."""

    def rms_norm(self, states: Tensor, norm: RmsNorm) -> Tensor:
        """The norm of `[T, width]`."""

    def rotary(self, states: Tensor, norm: RmsNorm, embedding: RotaryEmbedding) -> None:
        """Normalise and rotate, in place, the heads of `[T, H, width]` that `norm` has weights for.

        Those come first. A rotated pair has one number in each half of a head.
        """

    def gate(self, states: Tensor) -> Tensor:
        """`silu(x) y` of the halves x and y of `[T, 2 width]`: `[T, width]`."""

    def unit_rows(
        self, states: Tensor, dtype: torch.dtype, indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows of `[T, width]` divided by their lengths, in `dtype`, and the lengths, float32.

        `indices` int64 are the rows that are taken; None takes all.
        """

    def quantize_rows(self, states: Tensor, columns: Columns) -> QuantizedRows:
        """Quantize each row of `[T, width]`, float32 or bfloat16, to 255 steps of its own range."""

    def int8_gemm(
        self, weights: QuantizedWeights, dtype: torch.dtype, activation: str | None = None
    ) -> Int8Gemm:
        """Prepare `activation(rows x weights + bias)` in `dtype`."""


def choose_backend(
    device: torch.device, dtype: torch.dtype, attention: str = "auto"
) -> TorchBackend:
    """The fastest backend on this machine; the setting ATTENTION replaces only its attention.

    Raises `StartupError` if that attention cannot run on `device` in `dtype`.
    """
    make = _fastest(device, dtype)
    if attention == "auto":
        return make()
    require_runs(attention, device, dtype)
    return make(attention=attention)


def _fastest(device: torch.device, dtype: torch.dtype) -> Callable[..., TorchBackend]:
    if device.type == "cuda":
        kernels = load_kernels(device, dtype)
        if kernels is None:
            return partial(CudaBackend, device, dtype)
        return partial(FusedCudaBackend, kernels, device, dtype)
    if device.type != "cpu":
        return TorchBackend
    library = load_library() if dtype in FORMATS else None
    make = OneDnnBackend if library is None else partial(NativeBackend, library)
    return partial(make, dtype)
