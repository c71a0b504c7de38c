"""Prove that each operation computes correct results on a device.

Each path of an operation (a kernel in C, a library's operator, an attention kernel) computes the
small batches of `_OperationCases`. The results are compared with PyTorch's in float32, with eager
attention, on the same device. A path that raises an error, or differs by more than its dtype
explains, is refused, and the next one is tried.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from smart_embedder.errors import StartupError
from smart_embedder.kernels.backend import (
    ACTIVATIONS,
    Backend,
    Columns,
    LayerNorm,
    QuantizedRows,
    QuantizedWeights,
    RmsNorm,
    RotaryEmbedding,
    float8_rows,
    make_linear,
    torch_backend,
)
from smart_embedder.kernels.build import MAX_INT8
from smart_embedder.kernels.packed_batch import PackedBatch, pack
from smart_embedder.kernels.target import (
    ATTENTION,
    FLOAT8_OPERATIONS,
    INT8_OPERATIONS,
    Proof,
    Shapes,
    Target,
)

log = structlog.get_logger(__name__)

# The largest difference allowed, relative to the largest number. PyTorch rounds intermediate sums.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# A value halfway between two of the 255 steps of its row may be rounded to either.
_OPERATION_TOLERANCES = {"quantize_rows": 0.02}


def prove(target: Target, shapes: Shapes, operations: Sequence[str]) -> Target:
    """Return the target with the first path of each operation whose proof holds.

    Products are proven in the target's number format, 8 bits or float8. Raises `StartupError` if no
    path of an operation holds, or if the attention that ATTENTION names does not.
    """
    if target.float8:
        operations = (*FLOAT8_OPERATIONS, *operations)
    elif target.quantized and "linear" in operations:
        others = (name for name in operations if name not in {"linear", "add_linear"})
        operations = (*INT8_OPERATIONS, *others)
    for operation in operations:
        failed: list[Proof] = []
        for proof in prove_paths(target, shapes, operation):
            if proof.holds:
                break
            failed.append(proof)
        else:
            raise StartupError(
                f"this device does not compute {operation} correctly, not even with PyTorch's "
                f"operators ({failed[-1].reason}); choose another device with DEVICE"
            )
        if failed and target.attention_named and operation == ATTENTION:
            raise StartupError(
                f"ATTENTION={failed[0].path} does not compute correctly on this device "
                f"({failed[0].reason}); set ATTENTION to auto"
            )
        target = target.with_path(operation, proof.path, failed)
        target = replace(target, backend=target.backend.select(operation, proof.path))
    return target


@torch.inference_mode()
def prove_paths(target: Target, shapes: Shapes, operation: str) -> Iterator[Proof]:
    """Yield the proof of each path of an operation; PyTorch's operator comes last."""

    def compute(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
        return list(getattr(_OperationCases(target, shapes, dtype), operation)(backend))

    reference = torch_backend().select(ATTENTION, "eager")
    expected = compute(reference, torch.float32)
    tolerance = _OPERATION_TOLERANCES.get(operation, TOLERANCES[target.dtype])
    for path in target.backend.table[operation]:
        backend = target.backend.select(operation, path)
        yield try_path(
            operation, path, partial(compute, backend, target.dtype), expected, tolerance
        )


def try_path(
    operation: str,
    path: str,
    compute: Callable[[], list[Tensor]],
    expected: list[Tensor],
    tolerance: float,
) -> Proof:
    """Compare a path's results with the expected ones; an error that it raises fails the proof."""
    try:
        actual = compute()
    except Exception as error:  # noqa: BLE001 - after any error, the next path is tried
        message = next(iter(str(error).splitlines()), "")
        return Proof(operation, path, math.inf, 0.0, type(error).__name__, message)
    difference = max(starmap(_largest_difference, zip(actual, expected, strict=True)))
    return Proof(operation, path, difference, tolerance)


def _largest_difference(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    # On the host, because Apple's GPUs have no float64.
    actual, expected = actual.cpu().double(), expected.cpu().double()
    difference = float((actual - expected).abs().amax() / expected.abs().amax())
    # `max` would skip NaN.
    return math.inf if math.isnan(difference) else difference


# Shorter and longer than the blocks of kernels, and no multiples of them.
_LENGTHS = (1, 8, 66)
_MULTIPLE = 8
# More columns than a kernel computes at once, but few, so that the proof is fast.
_MAX_COLUMNS = 192
# A prime number, so that the rows of a matrix that is filled with these numbers all differ.
_RANDOM_NUMBERS = 65_537
_EPSILON = 1e-5
_THETA = 10_000.0


class _OperationCases:
    """A small batch of random numbers, the same for every path, and each operation on it.

    Each generator has the name of an operation and yields the results of a backend. Numbers are
    rounded to the target's dtype and converted to `dtype`.
    """

    def __init__(self, target: Target, shapes: Shapes, dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._device = target.device
        self._dtype = dtype
        self._rounded = target.dtype
        self._int8_weight_limit = target.backend.int8_weight_limit
        self._random = torch.randn(_RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0))
        self._next = 0
        texts = [np.zeros(length, np.int64) for length in _LENGTHS]
        self._packed: PackedBatch = pack(texts, device=target.device, multiple=_MULTIPLE)
        self._tokens = self._packed.tokens

    def _normal(self, *shape: int) -> Tensor:
        """Draw from the standard normal distribution, rounded to the model's dtype."""
        return self._float32(*shape).to(self._rounded).to(self._dtype)

    def _float32(self, *shape: int) -> Tensor:
        """Draw from the standard normal distribution, in float32 for every path."""
        count = math.prod(shape)
        times = -(-(self._next + count) // _RANDOM_NUMBERS)
        numbers = self._random.repeat(times)[self._next : self._next + count]
        self._next = (self._next + count) % _RANDOM_NUMBERS
        return numbers.view(shape).to(self._device)

    def _within(self, limit: int, *shape: int) -> Tensor:
        """Draw float32 numbers between `-limit` and `limit`, some of which are the limits."""
        return (self._float32(*shape) * limit / 2).clamp_(-limit, limit)

    def _layer(self, in_features: int, out_features: int) -> nn.Linear:
        """Draw a layer whose outputs are about as large as its inputs."""
        out = min(out_features, _MAX_COLUMNS)
        weight = self._normal(out, in_features) * in_features**-0.5
        return make_linear(weight, self._normal(out) if self._shapes.bias else None)

    def _layer_norm(self, width: int) -> LayerNorm:
        """Draw a norm; on a CPU its parameters are float32 whatever the model's dtype is."""
        draw = self._float32 if self._device.type == "cpu" else self._normal
        return LayerNorm(draw(width), draw(width), _EPSILON)

    def linear(self, backend: Backend) -> Iterator[Tensor]:
        shapes = self._shapes
        attended = shapes.heads * shapes.head_width
        sizes = (
            (shapes.width, attended, 3, None),
            (attended, shapes.width, 1, None),
            (shapes.width, shapes.inner_width, 1, shapes.activation),
            (shapes.inner_width, shapes.width, 1, None),
        )
        for depth, out, count, activation in sizes:
            layers = [self._layer(depth, out) for _ in range(count)]
            yield backend.linear(layers, activation)(self._normal(self._tokens, depth))

    def embed(self, backend: Backend) -> Iterator[Tensor]:
        count, width = self._tokens, self._shapes.width
        tables = self._normal(count, width), self._normal(count, width)
        rows = torch.arange(count, device=self._device)
        yield backend.embed((rows, rows.flip(0)), tables, self._layer_norm(width))

    def add_norm(self, backend: Backend) -> Iterator[Tensor]:
        shape = self._tokens, self._shapes.width
        norm = self._layer_norm(self._shapes.width)
        yield backend.add_norm(self._normal(*shape), self._normal(*shape), norm)

    def add_linear(self, backend: Backend) -> Iterator[Tensor]:
        width, depth = self._shapes.width, self._shapes.inner_width
        layer = self._layer(depth, width)
        residual = self._normal(self._tokens, layer.out_features)
        yield backend.add_linear(layer)(self._normal(self._tokens, depth), residual)

    def unit_rows(self, backend: Backend) -> Iterator[Tensor]:
        states = self._normal(self._tokens, self._shapes.width)
        for rows in (None, self._packed.cu_seqlens[:-1].long()):
            yield from backend.unit_rows(states, torch.float32, rows)

    def rms_norm(self, backend: Backend) -> Iterator[Tensor]:
        width = self._shapes.width
        norm = RmsNorm(self._normal(width), _EPSILON)
        yield backend.rms_norm(self._normal(self._tokens, width), norm)

    def rotary(self, backend: Backend) -> Iterator[Tensor]:
        shapes = self._shapes
        rotated = shapes.heads + shapes.key_heads
        states = self._normal(self._tokens, rotated + shapes.key_heads, shapes.head_width)
        norm = RmsNorm(self._normal(rotated, shapes.head_width), _EPSILON)
        positions = self._packed.position_ids[0]
        backend.rotary(states, norm, RotaryEmbedding.at(positions, shapes.head_width, _THETA))
        yield states

    def gate(self, backend: Backend) -> Iterator[Tensor]:
        for activation in filter(None, ACTIVATIONS):
            states = self._normal(self._tokens, 2 * self._shapes.inner_width)
            yield backend.gate(states, activation)

    def attention(self, backend: Backend) -> Iterator[Tensor]:
        shapes, packed = self._shapes, self._packed
        heads = [shapes.heads, shapes.key_heads, shapes.key_heads]
        projected = self._normal(packed.tokens, sum(heads), shapes.head_width)
        query, key, value = torch.split(projected.transpose(0, 1), heads)
        scale, causal = shapes.head_width**-0.5, shapes.causal
        attended = backend.attention((query, key, value), packed, scale=scale, causal=causal)
        yield attended[: packed.real_tokens]

    def quantize_rows(self, backend: Backend) -> Iterator[Tensor]:
        for width in (self._shapes.width, self._shapes.inner_width):
            repeated = torch.arange(0, width, 3, dtype=torch.int32)
            offsets = self._float32(width + len(repeated)).sigmoid()
            columns = Columns(self._float32(width).abs(), repeated, offsets)
            rows = backend.quantize_rows(self._normal(self._tokens, width), columns)
            yield rows.values * rows.scale + rows.minimum

    def int8_gemm(self, backend: Backend) -> Iterator[Tensor]:
        shapes, tokens, draw = self._shapes, self._tokens, self._float32
        for depth, activation in ((shapes.width, shapes.activation), (shapes.inner_width, None)):
            values = self._within(self._int8_weight_limit, _MAX_COLUMNS, depth).to(torch.int8)
            scale = draw(_MAX_COLUMNS).abs() / depth
            weights = QuantizedWeights(values, scale, draw(_MAX_COLUMNS), draw(_MAX_COLUMNS))
            bytes_of_rows = self._within(MAX_INT8, tokens, depth).add_(128).to(torch.uint8)
            rows = QuantizedRows(bytes_of_rows, draw(tokens, 1), draw(tokens, 1))
            for dtype in (torch.float32, self._dtype):
                yield backend.int8_gemm(weights, dtype, activation)(rows)

    def float8_rows(self, backend: Backend) -> Iterator[Tensor]:
        shapes = self._shapes
        for width, activation in ((shapes.width, None), (shapes.inner_width, shapes.activation)):
            values, scales = backend.float8_rows(self._normal(self._tokens, width), activation)
            yield values.float() * scales

    def float8_product(self, backend: Backend) -> Iterator[Tensor]:
        for depth in (self._shapes.width, self._shapes.inner_width):
            layer = self._layer(depth, _MAX_COLUMNS)
            rows = float8_rows(self._normal(self._tokens, depth))
            weights = float8_rows(layer.weight)
            yield backend.float8_product(rows, weights, layer.bias, self._dtype)
