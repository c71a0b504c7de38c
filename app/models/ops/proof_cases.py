"""The cases of the start-up proof: for each operation of a backend a small random batch."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from app.models.batch.packing import PackedBatch, pack
from app.models.ops.arguments import (
    Columns,
    LayerNorm,
    QuantizedRows,
    QuantizedWeights,
    RmsNorm,
    RotaryEmbedding,
)
from app.models.ops.instruction_sets import MAX_INT8
from app.models.ops.torch_backend import TorchBackend

ATTENTION, EMBED = "attention", "embed"
# Shorter and longer than the blocks in which kernels compute, and no multiple of them.
_LENGTHS = (1, 8, 66)
_MULTIPLE = 8
# Few columns, to be fast, but more than a kernel computes at once.
_MOST_COLUMNS = 192
# A prime number, so that all rows of a matrix that is filled with these numbers differ.
_DRAWN = 65_537
_EPSILON = 1e-5
_THETA = 10_000.0


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


class TrialInputs:
    """Random numbers, the same for every path.

    They are rounded to `dtype`; the reference, which is `exact`, gets them in float32.
    """

    def __init__(
        self,
        shapes: Shapes,
        device: torch.device,
        dtype: torch.dtype,
        int8_weight_limit: int,
        *,
        exact: bool,
    ) -> None:
        self.shapes = shapes
        self.int8_weight_limit = int8_weight_limit
        self.device = device
        self.dtype = torch.float32 if exact else dtype
        self._rounded = dtype
        self._drawn = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0))
        self._next = 0
        texts = [np.zeros(length, np.int64) for length in _LENGTHS]
        self.packed: PackedBatch = pack(texts, device=device, multiple=_MULTIPLE)

    @property
    def tokens(self) -> int:
        """Rows of the batch."""
        return self.packed.tokens

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

    def bytes(self, *shape: int) -> Tensor:
        """Whole numbers, u8; some are the lowest and the highest but 0."""
        return self._whole_numbers(shape, MAX_INT8).add_(128).to(torch.uint8)

    def int8_weights(self, *shape: int) -> Tensor:
        """Whole numbers, s8; some are the lowest and the highest that a weight may be."""
        return self._whole_numbers(shape, self.int8_weight_limit).to(torch.int8)

    def _whole_numbers(self, shape: tuple[int, ...], limit: int) -> Tensor:
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


Case = Callable[[TorchBackend, TrialInputs], Iterable[Tensor]]


def _linear(backend: TorchBackend, inputs: TrialInputs) -> Iterator[Tensor]:
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


def _embed(backend: TorchBackend, inputs: TrialInputs) -> Iterator[Tensor]:
    count, width = inputs.tokens, inputs.shapes.width
    tables = inputs.normal(count, width), inputs.normal(count, width)
    rows = torch.arange(count, device=inputs.device)
    yield backend.embed((rows, rows.flip(0)), tables, inputs.layer_norm(width))


def _add_norm(backend: TorchBackend, inputs: TrialInputs) -> Iterator[Tensor]:
    shape = inputs.tokens, inputs.shapes.width
    norm = inputs.layer_norm(inputs.shapes.width)
    yield backend.add_norm(inputs.normal(*shape), inputs.normal(*shape), norm)


def _add_linear(backend: TorchBackend, inputs: TrialInputs) -> Iterator[Tensor]:
    width, depth = inputs.shapes.width, inputs.shapes.inner_width
    layer = inputs.linear(depth, width)
    residual = inputs.normal(inputs.tokens, layer.out_features)
    yield backend.add_linear(layer)(inputs.normal(inputs.tokens, depth), residual)


def _unit_rows(backend: TorchBackend, inputs: TrialInputs) -> Iterator[Tensor]:
    states = inputs.normal(inputs.tokens, inputs.shapes.width)
    indices = inputs.packed.cu_seqlens[:-1].long()
    for rows in (None, indices):
        yield from backend.unit_rows(states, torch.float32, rows)


def _rms_norm(backend: TorchBackend, inputs: TrialInputs) -> Iterator[Tensor]:
    width = inputs.shapes.width
    norm = RmsNorm(inputs.normal(width), _EPSILON)
    yield backend.rms_norm(inputs.normal(inputs.tokens, width), norm)


def _rotary(backend: TorchBackend, inputs: TrialInputs) -> Iterator[Tensor]:
    shapes = inputs.shapes
    rotated = shapes.heads + shapes.key_heads
    states = inputs.normal(inputs.tokens, rotated + shapes.key_heads, shapes.head_width)
    norm = RmsNorm(inputs.normal(rotated, shapes.head_width), _EPSILON)
    positions = inputs.packed.position_ids[0]
    backend.rotary(states, norm, RotaryEmbedding.at(positions, shapes.head_width, _THETA))
    yield states


def _gate(backend: TorchBackend, inputs: TrialInputs) -> Iterator[Tensor]:
    yield backend.gate(inputs.normal(inputs.tokens, 2 * inputs.shapes.inner_width))


def _attention(backend: TorchBackend, inputs: TrialInputs) -> Iterator[Tensor]:
    shapes, packed = inputs.shapes, inputs.packed
    heads = [shapes.heads, shapes.key_heads, shapes.key_heads]
    projected = inputs.normal(packed.tokens, sum(heads), shapes.head_width)
    query, key, value = torch.split(projected.transpose(0, 1), heads)
    scale = shapes.head_width**-0.5
    attended = backend.attend(query, key, value, packed, scale=scale, causal=shapes.causal)
    yield attended[: packed.real_tokens]


def _quantize_rows(backend: TorchBackend, inputs: TrialInputs) -> Iterator[Tensor]:
    for width in (inputs.shapes.width, inputs.shapes.inner_width):
        repeated = torch.arange(0, width, 3, dtype=torch.int32)
        offsets = inputs.float32(width + len(repeated)).sigmoid()
        columns = Columns(inputs.float32(width).abs(), repeated, offsets)
        rows = backend.quantize_rows(inputs.normal(inputs.tokens, width), columns)
        yield rows.values * rows.scale + rows.minimum


def _int8_gemm(backend: TorchBackend, inputs: TrialInputs) -> Iterator[Tensor]:
    shapes, float32 = inputs.shapes, inputs.float32
    for depth, activation in ((shapes.width, shapes.activation), (shapes.inner_width, None)):
        values = inputs.int8_weights(_MOST_COLUMNS, depth)
        scale = float32(_MOST_COLUMNS).abs() / depth
        weights = QuantizedWeights(values, scale, float32(_MOST_COLUMNS), float32(_MOST_COLUMNS))
        rows = QuantizedRows(
            inputs.bytes(inputs.tokens, depth), float32(inputs.tokens, 1), float32(inputs.tokens, 1)
        )
        for dtype in (torch.float32, inputs.dtype):
            yield backend.int8_gemm(weights, dtype, activation)(rows)


CASES: dict[str, Case] = {
    "linear": _linear,
    EMBED: _embed,
    "add_norm": _add_norm,
    "add_linear": _add_linear,
    "unit_rows": _unit_rows,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "gate": _gate,
    ATTENTION: _attention,
    "quantize_rows": _quantize_rows,
    "int8_gemm": _int8_gemm,
}
ENCODER = ("linear", "add_norm", "unit_rows", ATTENTION)
GPU_ENCODER = (EMBED, *ENCODER)
QUANTIZED_ENCODER = ("quantize_rows", "int8_gemm", "add_norm", "unit_rows", ATTENTION)
DECODER = ("linear", "add_linear", "rms_norm", "rotary", "gate", ATTENTION)
