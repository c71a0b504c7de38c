"""The target of a model: its device, its number format, and the implementation of each operation.

`choose_backend` finds the implementations that run on this machine; `proof.py` tests them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import structlog
import torch

from smart_embedder.interface import ModelInfo, RefusedPath
from smart_embedder.kernels.attention import load_attention, require_attention_support
from smart_embedder.kernels.backend import (
    NATIVE,
    Backend,
    onednn_backend,
    torch_backend,
)
from smart_embedder.kernels.cuda import cuda_backend, fused_backend, load_kernels
from smart_embedder.kernels.native import FORMATS, load_library, native_backend
from smart_embedder.settings import FLOAT8, INT8

log = structlog.get_logger(__name__)

ATTENTION = "attention"
# The operations of a layer, and those that a product consists of in 8 bits.
ENCODER = ("linear", "add_norm", "unit_rows", ATTENTION)
GPU_ENCODER = ("embed", *ENCODER)
DECODER = ("linear", "add_linear", "rms_norm", "rotary", "gate", ATTENTION)
INT8_OPERATIONS = ("quantize_rows", "int8_gemm")
FLOAT8_OPERATIONS = ("float8_rows", "float8_product")


def choose_backend(device: torch.device, dtype: torch.dtype, attention: str = "auto") -> Backend:
    """Return the fastest backend on this machine, with the attention that ATTENTION names.

    Raises `StartupError` if that attention cannot run on `device` in `dtype`.
    """
    backend = _fastest(device, dtype)
    if attention == "auto":
        return backend
    require_attention_support(attention, device, dtype)
    return with_attention(backend, attention)


def with_attention(backend: Backend, name: str) -> Backend:
    """Return the backend with another attention; raises `StartupError` if it is not installed."""
    attention = backend.table[ATTENTION].get(name) or load_attention(name)
    return backend.prefer(name, attention=attention)


def _fastest(device: torch.device, dtype: torch.dtype) -> Backend:
    if device.type == "cuda":
        kernels = load_kernels(device, dtype)
        backend = cuda_backend(device, dtype)
        return backend if kernels is None else fused_backend(kernels, dtype, backend)
    if device.type != "cpu":
        return torch_backend()
    library = load_library() if dtype in FORMATS else None
    return onednn_backend(dtype) if library is None else native_backend(library, dtype)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes and features of a model's layers."""

    width: int
    inner_width: int
    heads: int
    key_heads: int
    head_width: int
    activation: str | None = None
    bias: bool = True
    causal: bool = False


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of testing one path of an operation.

    `difference` is the largest difference from the reference, relative to the reference's largest
    number. `error` is the class of the error that the path raised, `message` its first line.
    """

    operation: str
    path: str
    difference: float
    tolerance: float
    error: str | None = None
    message: str = ""

    @property
    def holds(self) -> bool:
        """Whether the path computes correct results and may be used."""
        return self.error is None and self.difference <= self.tolerance

    @property
    def reason(self) -> str:
        """Why the path was refused; without the message, which may name folders of this machine."""
        if self.error is not None:
            return f"raises {self.error}"
        return f"differs by {self.difference:.1e}, allowed are {self.tolerance:.0e}"


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how a model runs: its device, its dtype, and the path of each operation.

    `paths` are those that were proven, by operation. `refused` are the proofs that failed.
    """

    device: torch.device
    dtype: torch.dtype
    backend: Backend
    # Whether matrix products are computed in 8 bits, and the rest in `dtype`.
    quantized: bool = False
    # Whether matrix products are computed in float8, and the rest in `dtype`.
    float8: bool = False
    # The number of threads of each forward, if several workers share the cores of a CPU.
    cpu_threads: int | None = None
    # Whether ATTENTION names the attention, so that no other may replace it.
    attention_named: bool = False
    paths: dict[str, str] = field(default_factory=dict)
    refused: tuple[Proof, ...] = ()

    def with_path(self, operation: str, path: str, refused: Sequence[Proof] = ()) -> Self:
        """Return a copy with this path of an operation; logs a warning for each `refused` path."""
        log_refused_paths(refused, path)
        paths = {**self.paths, operation: path}
        return replace(self, paths=paths, refused=(*self.refused, *refused))

    def describe(self, name: str) -> ModelInfo:
        """Describe a model that runs on this target."""
        named = FLOAT8 if self.float8 else str(self.dtype).removeprefix("torch.")
        dtype = INT8 if self.quantized else named
        return ModelInfo(
            name=name,
            dtype=dtype,
            paths=self.paths,
            refused=tuple(
                RefusedPath(proof.operation, proof.path, proof.reason) for proof in self.refused
            ),
            kernels=self.backend.kernels if NATIVE in self.paths.values() else None,
        )


def log_refused_paths(refused: Sequence[Proof], used_instead: str) -> None:
    """Log a warning for each path that is not used."""
    for proof in refused:
        log.warning(
            "path_refused",
            operation=proof.operation,
            path=proof.path,
            reason=f"{proof.reason}: {proof.message}" if proof.message else proof.reason,
            used_instead=used_instead,
        )
