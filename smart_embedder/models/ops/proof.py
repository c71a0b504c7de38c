"""The target of a model, and the proof that each operation computes there what it should.

Each path of an operation (a kernel in C, a library's operator, an attention) computes a small batch
as `CASES` says. The reference is PyTorch in float32 with eager attention on the same device. A path
that raises an error, or differs by more than its dtype explains, is refused, and the next is tried.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
from typing import Self

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from smart_embedder import __version__
from smart_embedder.engine.model import ModelInfo, RefusedPath
from smart_embedder.errors import StartupError
from smart_embedder.models.batch import PackedBatch, pack
from smart_embedder.models.ops.backend import (
    ACTIVATIONS,
    NATIVE,
    Backend,
    Columns,
    LayerNorm,
    QuantizedRows,
    QuantizedWeights,
    RmsNorm,
    RotaryEmbedding,
    float8_rows,
    torch_backend,
)
from smart_embedder.models.ops.build import MAX_INT8
from smart_embedder.settings import FLOAT8, INT8

log = structlog.get_logger(__name__)

ATTENTION = "attention"
# The operations of a layer, and those that a product is made of in 8 bits.
ENCODER = ("linear", "add_norm", "unit_rows", ATTENTION)
GPU_ENCODER = ("embed", *ENCODER)
DECODER = ("linear", "add_linear", "rms_norm", "rotary", "gate", ATTENTION)
INT8_OPERATIONS = ("quantize_rows", "int8_gemm")
FLOAT8_OPERATIONS = ("float8_rows", "float8_product")
# The largest difference, as a share of the largest number; PyTorch rounds some sums in between.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# Where a value lies between two of the 255 steps of its row, either may be chosen.
_ONE_STEP = {"quantize_rows": 0.02}


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
    """The result of the trial of one path of an operation.

    `difference` is the largest one, relative to the largest number. `error` is the class of an
    error that was raised, and `message` its first line.
    """

    operation: str
    path: str
    difference: float
    tolerance: float
    error: str | None = None
    message: str = ""

    @property
    def holds(self) -> bool:
        """Whether the path may be used."""
        return self.error is None and self.difference <= self.tolerance

    @property
    def reason(self) -> str:
        """Why it was refused, without the message, which may name folders of this machine."""
        if self.error is not None:
            return f"raises {self.error}"
        return f"differs by {self.difference:.1e}, allowed are {self.tolerance:.0e}"


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how a model runs: by the proven `paths` of operations, not the `refused` ones."""

    device: torch.device
    dtype: torch.dtype
    backend: Backend
    # Matrix products in 8 bits, the rest in `dtype`.
    quantized: bool = False
    # The same in float8.
    float8: bool = False
    # Threads of every forward, where several workers share the cores of a CPU.
    cpu_threads: int | None = None
    # Whether a setting names the attention, so that no other may replace it.
    attention_named: bool = False
    paths: dict[str, str] = field(default_factory=dict)
    refused: tuple[Proof, ...] = ()

    def prove(self, shapes: Shapes, operations: Sequence[str]) -> Self:
        """A copy with the first path of each operation whose proof holds.

        For products the operations are those of the target's number format. Raises `StartupError`
        if none holds, or if that of an attention that a setting names fails.
        """
        backend, paths, refused = self.backend, {**self.paths}, [*self.refused]
        if self.float8:
            operations = (*FLOAT8_OPERATIONS, *operations)
        elif self.quantized and "linear" in operations:
            others = (each for each in operations if each not in {"linear", "add_linear"})
            operations = (*INT8_OPERATIONS, *others)
        for operation in operations:
            failed: list[Proof] = []
            for proof in self.proofs(shapes, operation):
                if proof.holds:
                    break
                failed.append(proof)
            else:
                raise StartupError(
                    f"this device does not compute {operation} correctly, not even by PyTorch's "
                    f"own operators ({failed[-1].reason}); choose another with DEVICE"
                )
            if failed and self.attention_named and operation == ATTENTION:
                raise StartupError(
                    f"ATTENTION={failed[0].path} does not compute what it should on this device "
                    f"({failed[0].reason}); set ATTENTION to auto"
                )
            warn_of_refused(failed, proof.path)
            refused += failed
            backend = backend.by(operation, proof.path)
            paths[operation] = proof.path
        return replace(self, backend=backend, paths=paths, refused=tuple(refused))

    @torch.inference_mode()
    def proofs(self, shapes: Shapes, operation: str) -> Iterator[Proof]:
        """The proof of each path of an operation; the last one is that of the plain path."""

        def compute(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
            return list(CASES[operation](backend, _Inputs(self, shapes, dtype)))

        reference = torch_backend().by(ATTENTION, "eager")
        expected = compute(reference, torch.float32)
        tolerance = _ONE_STEP.get(operation, TOLERANCES[self.dtype])
        for path in self.backend.table[operation]:
            backend = self.backend.by(operation, path)
            yield try_path(
                operation, path, partial(compute, backend, self.dtype), expected, tolerance
            )

    def describe(self, name: str) -> ModelInfo:
        """The description of a model that runs so."""
        named = FLOAT8 if self.float8 else str(self.dtype).removeprefix("torch.")
        dtype = INT8 if self.quantized else named
        # What lies between the kernels changes with the version of all.
        versions = [f"torch{torch.__version__}", __version__]
        if NATIVE in self.paths.values():
            versions.insert(0, self.backend.kernels)
        if self.device.type != "cpu":
            versions.insert(0, self.device.type)
        return ModelInfo(
            name=name,
            dtype=dtype,
            paths=self.paths,
            refused=tuple(RefusedPath(p.operation, p.path, p.reason) for p in self.refused),
            precision="/".join([dtype, "+".join(sorted({*self.paths.values()})), *versions]),
        )


def try_path(
    operation: str,
    path: str,
    compute: Callable[[], list[Tensor]],
    expected: list[Tensor],
    tolerance: float,
) -> Proof:
    """Compare what a path computes with the expected results; an error is part of the proof."""
    try:
        actual = compute()
    except Exception as error:  # noqa: BLE001 - whatever it is, another path is taken
        message = next(iter(str(error).splitlines()), "")
        return Proof(operation, path, math.inf, 0.0, type(error).__name__, message)
    difference = max(starmap(_largest_difference, zip(actual, expected, strict=True)))
    return Proof(operation, path, difference, tolerance)


def _largest_difference(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    # On the host: Apple's GPUs have no float64.
    mine, other = (each.cpu().double() for each in (actual, expected))
    share = float((mine - other).abs().amax() / other.abs().amax())
    # `max` would pass over what is not a number.
    return math.inf if math.isnan(share) else share


def warn_of_refused(refused: Sequence[Proof], used_instead: str) -> None:
    """One warning for each path that is not used."""
    for proof in refused:
        log.warning(
            "path_refused",
            operation=proof.operation,
            path=proof.path,
            reason=f"{proof.reason}: {proof.message}" if proof.message else proof.reason,
            used_instead=used_instead,
        )


# Shorter and longer than the blocks in which kernels compute, and no multiple of them.
_LENGTHS = (1, 8, 66)
_MULTIPLE = 8
# Few columns, to be fast, but more than a kernel computes at once.
_MOST_COLUMNS = 192
# A prime number, so that all rows of a matrix that is filled with these numbers differ.
_DRAWN = 65_537
_EPSILON = 1e-5
_THETA = 10_000.0


class _Inputs:
    """Random numbers, the same for every path, rounded as the target's, in `dtype`."""

    def __init__(self, target: Target, shapes: Shapes, dtype: torch.dtype) -> None:
        self.shapes = shapes
        self.device = target.device
        self.dtype = dtype
        self._rounded = target.dtype
        self.int8_weight_limit = target.backend.int8_weight_limit
        self._drawn = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0))
        self._next = 0
        texts = [np.zeros(length, np.int64) for length in _LENGTHS]
        self.packed: PackedBatch = pack(texts, device=target.device, multiple=_MULTIPLE)
        self.tokens = self.packed.tokens

    def normal(self, *shape: int) -> Tensor:
        """Of the standard normal distribution, in the model's number format."""
        return self.float32(*shape).to(self._rounded).to(self.dtype)

    def float32(self, *shape: int) -> Tensor:
        """The same, in float32 for every path."""
        count = math.prod(shape)
        times = -(-(self._next + count) // _DRAWN)
        taken = self._drawn.repeat(times)[self._next : self._next + count]
        self._next = (self._next + count) % _DRAWN
        return taken.view(shape).to(self.device)

    def within(self, limit: int, *shape: int) -> Tensor:
        """The same up to `limit`, which some are, and down to its negative."""
        return (self.float32(*shape) * limit / 2).clamp_(-limit, limit)

    def linear(self, in_features: int, out_features: int) -> nn.Linear:
        """A layer whose outputs are about as large as its inputs."""
        out = min(out_features, _MOST_COLUMNS)
        layer = nn.Linear(in_features, out, self.shapes.bias, "meta")
        layer.weight = nn.Parameter(self.normal(out, in_features) * in_features**-0.5)
        if self.shapes.bias:
            layer.bias = nn.Parameter(self.normal(out))
        return layer

    def layer_norm(self, width: int) -> LayerNorm:
        """On a CPU its parameters are float32 in every number format."""
        draw = self.float32 if self.device.type == "cpu" else self.normal
        return LayerNorm(draw(width), draw(width), _EPSILON)


def _linear(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    shapes, tokens = inputs.shapes, inputs.tokens
    attended = shapes.heads * shapes.head_width
    sizes = (
        (shapes.width, attended, 3, None),
        (attended, shapes.width, 1, None),
        (shapes.width, shapes.inner_width, 1, shapes.activation),
        (shapes.inner_width, shapes.width, 1, None),
    )
    for depth, out, count, activation in sizes:
        layers = [inputs.linear(depth, out) for _ in range(count)]
        yield backend.linear(layers, activation)(inputs.normal(tokens, depth))


def _embed(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    count, width = inputs.tokens, inputs.shapes.width
    tables = inputs.normal(count, width), inputs.normal(count, width)
    rows = torch.arange(count, device=inputs.device)
    yield backend.embed((rows, rows.flip(0)), tables, inputs.layer_norm(width))


def _add_norm(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    shape = inputs.tokens, inputs.shapes.width
    norm = inputs.layer_norm(inputs.shapes.width)
    yield backend.add_norm(inputs.normal(*shape), inputs.normal(*shape), norm)


def _add_linear(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    width, depth = inputs.shapes.width, inputs.shapes.inner_width
    layer = inputs.linear(depth, width)
    residual = inputs.normal(inputs.tokens, layer.out_features)
    yield backend.add_linear(layer)(inputs.normal(inputs.tokens, depth), residual)


def _unit_rows(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    states = inputs.normal(inputs.tokens, inputs.shapes.width)
    indices = inputs.packed.cu_seqlens[:-1].long()
    for rows in (None, indices):
        yield from backend.unit_rows(states, torch.float32, rows)


def _rms_norm(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    width = inputs.shapes.width
    norm = RmsNorm(inputs.normal(width), _EPSILON)
    yield backend.rms_norm(inputs.normal(inputs.tokens, width), norm)


def _rotary(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    shapes = inputs.shapes
    rotated = shapes.heads + shapes.key_heads
    states = inputs.normal(inputs.tokens, rotated + shapes.key_heads, shapes.head_width)
    norm = RmsNorm(inputs.normal(rotated, shapes.head_width), _EPSILON)
    positions = inputs.packed.position_ids[0]
    backend.rotary(states, norm, RotaryEmbedding.at(positions, shapes.head_width, _THETA))
    yield states


def _gate(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    for activation in filter(None, ACTIVATIONS):
        states = inputs.normal(inputs.tokens, 2 * inputs.shapes.inner_width)
        yield backend.gate(states, activation)


def _attention(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    shapes, packed = inputs.shapes, inputs.packed
    heads = [shapes.heads, shapes.key_heads, shapes.key_heads]
    projected = inputs.normal(packed.tokens, sum(heads), shapes.head_width)
    query, key, value = torch.split(projected.transpose(0, 1), heads)
    scale, causal = shapes.head_width**-0.5, shapes.causal
    attended = backend.attention((query, key, value), packed, scale=scale, causal=causal)
    yield attended[: packed.real_tokens]


def _quantize_rows(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    for width in (inputs.shapes.width, inputs.shapes.inner_width):
        repeated = torch.arange(0, width, 3, dtype=torch.int32)
        offsets = inputs.float32(width + len(repeated)).sigmoid()
        columns = Columns(inputs.float32(width).abs(), repeated, offsets)
        rows = backend.quantize_rows(inputs.normal(inputs.tokens, width), columns)
        yield rows.values * rows.scale + rows.minimum


def _int8_gemm(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    shapes, tokens, float32 = inputs.shapes, inputs.tokens, inputs.float32
    for depth, activation in ((shapes.width, shapes.activation), (shapes.inner_width, None)):
        values = inputs.within(inputs.int8_weight_limit, _MOST_COLUMNS, depth).to(torch.int8)
        scale = float32(_MOST_COLUMNS).abs() / depth
        weights = QuantizedWeights(values, scale, float32(_MOST_COLUMNS), float32(_MOST_COLUMNS))
        bytes_of_rows = inputs.within(MAX_INT8, tokens, depth).add_(128).to(torch.uint8)
        rows = QuantizedRows(bytes_of_rows, float32(tokens, 1), float32(tokens, 1))
        for dtype in (torch.float32, inputs.dtype):
            yield backend.int8_gemm(weights, dtype, activation)(rows)


def _float8_rows(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    shapes = inputs.shapes
    for width, activation in ((shapes.width, None), (shapes.inner_width, shapes.activation)):
        values, scales = backend.float8_rows(inputs.normal(inputs.tokens, width), activation)
        yield values.float() * scales


def _float8_product(backend: Backend, inputs: _Inputs) -> Iterator[Tensor]:
    for depth in (inputs.shapes.width, inputs.shapes.inner_width):
        layer = inputs.linear(depth, _MOST_COLUMNS)
        rows, weights = float8_rows(inputs.normal(inputs.tokens, depth)), float8_rows(layer.weight)
        yield backend.float8_product(rows, weights, layer.bias, inputs.dtype)


CASES: dict[str, Callable[[Backend, _Inputs], Iterator[Tensor]]] = {
    "linear": _linear,
    "embed": _embed,
    "add_norm": _add_norm,
    "add_linear": _add_linear,
    "unit_rows": _unit_rows,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "gate": _gate,
    ATTENTION: _attention,
    "quantize_rows": _quantize_rows,
    "int8_gemm": _int8_gemm,
    "float8_rows": _float8_rows,
    "float8_product": _float8_product,
}
