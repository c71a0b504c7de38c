"""The kernels in C compared with the definitions, at sizes around those of tiles, panels, tasks."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from smart_embedder.kernels import native
from smart_embedder.kernels.backend import (
    LayerNorm,
    QuantizedRows,
    QuantizedWeights,
    RmsNorm,
    RotaryEmbedding,
    torch_backend,
)
from smart_embedder.kernels.native import native_backend
from smart_embedder.models.families.int8 import quantize
from tests.support.native import ACTIVATIONS, LIBRARIES, needs_kernels

pytestmark = [needs_kernels, pytest.mark.long]
SHAPES = {
    "rows": st.integers(0, 40) | st.sampled_from([768, 769]),
    "depth": st.integers(1, 12).map(lambda n: 16 * n) | st.sampled_from([1040, 2064]),
    "activation": st.sampled_from(list(ACTIVATIONS)),
}
# The tolerance of rounded results.
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-5},
}


def layer_of(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.to(dtype))
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(dtype))
    return layer


def random_layer(out: int, depth: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(out + depth)
    weight = torch.randn(out, depth) / math.sqrt(depth)
    return layer_of(weight, torch.randn(out) if bias else None, dtype)


# With 13 rows the second tile has fewer rows than any other tile of its kind.
@example(rows=13, depth=16, outs=[64], bias=True, activation=None)
@given(
    **SHAPES,
    outs=st.lists(st.sampled_from([7, 64, 128, 192]), min_size=1, max_size=3),
    bias=st.booleans(),
)
@settings(max_examples=10)
@torch.inference_mode()
def test_linear_is_exact_to_the_last_digits(
    backend, dtype, rows, depth, outs, bias, activation
) -> None:
    """Products of layers that read the same states lie side by side."""
    layers = [random_layer(out, depth, dtype, bias=bias) for out in outs]
    states = torch.randn(rows, depth).to(dtype)
    actual = backend.linear(layers, activation)(states)
    exact = torch.cat([layer.double()(states.double()) for layer in layers], 1)
    torch.testing.assert_close(actual.double(), ACTIVATIONS[activation](exact), **CLOSE[dtype])


@given(**SHAPES, out=st.sampled_from([7, 64, 80, 128, 192, 256]))
@settings(max_examples=10)
def test_int8_gemm_is_exact(backend, dtype, rows, depth, out, activation) -> None:
    """Some numbers of columns are left to oneDNN, whose sums are exact, too."""
    limit = backend.int8_weight_limit
    values = torch.randint(-limit, limit + 1, (out, depth), dtype=torch.int8)
    weights = QuantizedWeights(values, torch.rand(out) / depth, torch.randn(out), torch.randn(out))
    values = torch.randint(0, 256, (rows, depth), dtype=torch.uint8)
    states = QuantizedRows(values, torch.rand(rows, 1), torch.randn(rows, 1))
    actual = backend.int8_gemm(weights, dtype, activation)(states)
    exact = (values.double() @ weights.values.double().t()) * weights.scale * states.scale
    exact += states.minimum * weights.sums + weights.bias
    torch.testing.assert_close(actual.double(), ACTIVATIONS[activation](exact), **CLOSE[dtype])


# With some activations, whole tiles are written in another way than partial ones.
@pytest.mark.parametrize(
    ("quantized", "activation"), [(False, "gelu"), (False, "silu"), (True, None)]
)
@torch.inference_mode()
def test_rows_have_the_same_bits_in_any_batch_and_on_any_threads(
    backend, dtype, quantized, activation
) -> None:
    states = torch.randn(500, 2048).to(dtype)
    if quantized:
        layer = random_layer(192, 2048, torch.float32)
        linear = quantize([layer], states.float(), backend, dtype, activation)
    else:
        linear = backend.linear([random_layer(192, 2048, dtype)], activation)
    before, together = torch.get_num_threads(), linear(states)
    assert torch.equal(torch.cat([linear(row[None]) for row in states[:20]]), together[:20])
    assert torch.equal(linear(states[7:30]), together[7:30])
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(linear(states), together)
    finally:
        torch.set_num_threads(before)


# No row, one row, the rows of a tile or a task and one more or less; widths of one number, odd
# widths, and widths far above a model's; rows that begin at any aligned number.
EDGES = {
    "rows": st.sampled_from([0, 1, 2, 5, 6, 7, 48, 49]),
    "width": st.sampled_from([1, 3, 15, 17]) | st.sampled_from([1, 2, 3, 65]).map(lambda n: 16 * n),
    "begin": st.sampled_from([0, 1, 3, 8]),
}
HUGE = 1 << 14


def placed(values: torch.Tensor, begin: int) -> torch.Tensor:
    """Copy the values to the end of new memory, `begin` numbers after its start."""
    memory = values.new_empty(begin + values.numel())
    memory[begin:] = values.reshape(-1)
    return memory[begin:].view(values.shape)


@given(**EDGES, heads=st.integers(1, 3))
@example(rows=2, width=HUGE, begin=1, heads=1)
@example(rows=0, width=HUGE, begin=0, heads=1)
@settings(max_examples=10)
def test_row_operations_of_any_shape_match_pytorch(
    backend, dtype, rows, width, begin, heads
) -> None:
    torch.manual_seed(rows + width)
    shapes = {
        "states": (rows, width),
        "residual": (rows, width),
        "pairs": (rows, 2 * width),
        "heads": (rows, heads + 1, 2 * width),
        "norm": (width,),
        "head_norm": (heads, 2 * width),
    }
    drawn = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    factors = torch.randn(2 * rows + 2, width)

    def results(backend, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        inputs = {name: placed(values.to(dtype), begin) for name, values in drawn.items()}
        *embedding, weight, bias = (
            placed(part, begin) for part in factors.split([rows, rows, 1, 1])
        )
        norm = LayerNorm(weight[0], bias[0], 1e-3)
        yield backend.rms_norm(inputs["states"], RmsNorm(inputs["norm"], 1e-3))
        yield backend.add_norm(inputs["states"], inputs["residual"], norm)
        for activation in filter(None, ACTIVATIONS):
            yield backend.gate(inputs["pairs"].clone(), activation)
        head_norm = RmsNorm(inputs["head_norm"], 1e-3)
        backend.rotary(inputs["heads"], head_norm, RotaryEmbedding(*embedding))
        yield inputs["heads"]

    close = {"rtol": 2**-7, "atol": 2**-7} if dtype is torch.bfloat16 else CLOSE[dtype]
    exact = results(torch_backend(), torch.float32)
    for actual, expected in zip(results(backend, dtype), exact, strict=True):
        torch.testing.assert_close(actual.float(), expected, **close)


@pytest.mark.parametrize(
    "states",
    [torch.zeros(4, 64)[:, ::2], torch.zeros(4, 32, dtype=torch.float64)],
    ids=["gaps", "another dtype"],
)
def test_unsupported_memory_layout_is_refused(backend, states) -> None:
    with pytest.raises(ValueError, match=r"a kernel needs torch\..* numbers without gaps"):
        backend.add_norm(states, states, LayerNorm(torch.ones(32), torch.zeros(32), 1e-5))


@pytest.mark.parametrize(
    ("out", "depth", "left"),
    [(128, 48, []), (96, 64, ["int8_gemm"]), (64, 40, ["linear", "int8_gemm"])],
)
def test_unsupported_shapes_are_left_to_onednn(monkeypatch, dtype, out, depth, left) -> None:
    """The kernels pad odd widths, except in 8 bits, where oneDNN is exact, too."""
    calls = []
    plain = replace(
        torch_backend(),
        linear=lambda *_: calls.append("linear"),
        int8_gemm=lambda *_: calls.append("int8_gemm"),
    )
    monkeypatch.setattr(native, "onednn_backend", lambda *_: plain)
    backend = native_backend(LIBRARIES[0], dtype)
    backend.linear([random_layer(out, depth, dtype)])
    values = torch.zeros(out, depth, dtype=torch.int8)
    backend.int8_gemm(QuantizedWeights(values, *torch.ones(3, out)), dtype)
    assert calls == left


@given(
    st.integers(1, 70),
    st.integers(1, 200),
    st.sampled_from([32, 96, 1024]),
    st.booleans(),
    st.sampled_from(list(CLOSE)),
)
@settings(max_examples=20)
def test_row_linear_has_the_same_bits_alone_and_in_a_batch(rows, out, depth, bias, dtype) -> None:
    torch.manual_seed(rows)
    layer = nn.Linear(depth, out, bias=bias, dtype=dtype)
    head = native.use_row_linear(nn.Sequential(layer, nn.Tanh()))
    states = torch.randn(rows, depth).to(dtype)
    with torch.inference_mode():
        together = head(states)
        expected = torch.tanh(functional.linear(states, layer.weight, layer.bias))
        alone = torch.cat([head(states[row : row + 1]) for row in range(rows)])
    assert together.shape == (rows, out)
    assert torch.equal(together, alone)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    assert torch.allclose(together.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("layer", [nn.Linear(30, 8), nn.Linear(64, 8, dtype=torch.float16)])
def test_row_linear_refuses_unsupported_layers(layer: nn.Linear) -> None:
    with pytest.raises(ValueError, match="no kernel multiplies"):
        native.use_row_linear(nn.Sequential(layer))
