"""Every backend that runs here against the plain one, and each against the definitions."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from smart_embedder.models.device.choose import cpu_has_int8
from smart_embedder.models.ops.backend import (
    ACTIVATIONS,
    Backend,
    Columns,
    LayerNorm,
    QuantizedRows,
    QuantizedWeights,
    RmsNorm,
    RotaryEmbedding,
    dequantize,
    onednn_backend,
    torch_backend,
)
from smart_embedder.models.ops.choose import choose_backend, with_attention
from smart_embedder.models.ops.cuda import cuda_backend, fused_backend
from smart_embedder.models.ops.native import dequantize_by, native_backend
from tests.support.emulated_kernels import CAN_EMULATE, EmulatedKernels
from tests.support.native import LIBRARIES
from tests.support.packed_attention import pack_lengths, random_states

pytestmark = pytest.mark.device
CPU = torch.device("cpu")
NAMES_OF_LIBRARIES = [each.instructions.name for each in LIBRARIES]
REFERENCE = with_attention(torch_backend(), "eager")
BACKENDS = [
    pytest.param(torch_backend(), "cpu", id="torch"),
    pytest.param(onednn_backend(torch.bfloat16), "cpu", id="onednn"),
    *(
        pytest.param(
            with_attention(native_backend(each, torch.bfloat16), "native"),
            "cpu",
            id=each.instructions.name,
        )
        for each in LIBRARIES
    ),
]
if CAN_EMULATE:
    FUSED = with_attention(
        fused_backend(EmulatedKernels(torch.bfloat16), torch.bfloat16, torch_backend()), "eager"
    )
    BACKENDS.append(pytest.param(FUSED, "cpu", id="fused"))
if torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
    CUDA = torch.device("cuda")
    BACKENDS += [
        pytest.param(cuda_backend(CUDA, torch.bfloat16), "cuda", id="cuda"),
        pytest.param(choose_backend(CUDA, torch.bfloat16), "cuda", id="fused on cuda"),
    ]
on_a_cpu = pytest.mark.parametrize(
    "backend",
    [pytest.param(each.values[0], id=each.id) for each in BACKENDS if each.values[1] == "cpu"],
)
# bfloat16 is rounded to 2^-8 at the end, and by PyTorch also in between.
CLOSE = {"rtol": 2**-6, "atol": 2**-6}
SHAPES = {"count": st.integers(1, 70), "width": st.integers(1, 20).map(lambda n: 16 * n)}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape).to(dtype)


def random_layer(width: int, out: int, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(width * out)
    return nn.Linear(width, out).to(dtype)


def random_layer_norm(width: int) -> LayerNorm:
    return LayerNorm(*torch.unbind(random(2, width, dtype=torch.float32)), 1e-5)


def moved(argument, device: str, dtype: torch.dtype | None):
    """Tensors, layers and norms on a device; those in bfloat16 in `dtype`, where one is given."""
    if isinstance(argument, Tensor):
        return argument.to(device, dtype if argument.dtype is torch.bfloat16 else None, copy=True)
    if isinstance(argument, nn.Linear):
        layer = nn.Linear(argument.in_features, argument.out_features, dtype=torch.bfloat16)
        layer.load_state_dict(argument.state_dict())
        return layer.to(device, dtype)
    if isinstance(argument, LayerNorm) and device != "cpu":  # Elsewhere it is as the states.
        argument = LayerNorm(argument.weight.bfloat16(), argument.bias.bfloat16(), argument.epsilon)
    if isinstance(argument, LayerNorm | RmsNorm | RotaryEmbedding):
        values = (getattr(argument, name) for name in argument.__slots__)
        return type(argument)(*(moved(value, device, dtype) for value in values))
    return argument


def linear(backend: Backend, states: Tensor, layer: nn.Linear, activation: str | None) -> Tensor:
    return backend.linear([layer, layer], activation)(states)


def rotary(backend: Backend, states: Tensor, norm: RmsNorm, embedding: RotaryEmbedding) -> Tensor:
    backend.rotary(states, norm, embedding)
    return states


def attention(
    backend: Backend, query: Tensor, key: Tensor, value: Tensor, *, causal: bool
) -> Tensor:
    packed = pack_lengths([3, 17, 17, 70], device=query.device)
    return backend.attention((query, key, value), packed, scale=0.2, causal=causal)


def gate(backend: Backend, states: Tensor, activation: str) -> Tensor:
    return backend.gate(states.clone(), activation)


PLACES = torch.tensor([7, 49, 0, 7]), torch.tensor([50, 0, 1, 2])
ROTARY = (
    random(30, 5, 64),
    RmsNorm(random(3, 64), 1e-6),
    RotaryEmbedding.at(torch.arange(30), 64, 1e6),
)
OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple]] = {
    **{
        f"linear {activation}": (linear, (random(40, 64), random_layer(64, 96), activation))
        for activation in ACTIVATIONS
    },
    "linear of odd shapes": (linear, (random(7, 33), random_layer(33, 7), "gelu")),
    "embed": (
        lambda backend, norm, *tables: backend.embed(
            tuple(places.to(tables[0].device) for places in PLACES), tables, norm
        ),
        (random_layer_norm(64), random(50, 64), random(51, 64)),
    ),
    "add_norm": (
        lambda backend, *arguments: backend.add_norm(*arguments),
        (random(40, 64), random(41, 64)[:40], random_layer_norm(64)),
    ),
    "add_linear": (
        lambda backend, layer, states, residual: backend.add_linear(layer)(states, residual),
        (random_layer(64, 96), random(40, 64), random(40, 96)),
    ),
    "rms_norm": (
        lambda backend, *arguments: backend.rms_norm(*arguments),
        (random(40, 64), RmsNorm(random(64), 1e-6)),
    ),
    "rotary": (rotary, ROTARY),
    **{
        f"gate by {activation}": (gate, (random(40, 128), activation))
        for activation in filter(None, ACTIVATIONS)
    },
    "gate of an odd width": (gate, (random(40, 50), "gelu_new")),
    "attention": (partial(attention, causal=False), random_states(107, 2, 32)),
    "causal attention": (partial(attention, causal=True), random_states(107, 2, 32, group=2)),
}


@pytest.mark.parametrize(
    ("backend", "device", "dtype"),
    [
        *(pytest.param(*each.values, None, id=each.id) for each in BACKENDS),
        *(
            pytest.param(native_backend(each, torch.float32), "cpu", torch.float32)
            for each in LIBRARIES
        ),
    ],
)
@pytest.mark.parametrize("operation", OPERATIONS)
@torch.inference_mode()
def test_every_backend_computes_what_the_plain_one_does_in_float32(
    backend: Backend, device: str, dtype: torch.dtype | None, operation: str
) -> None:
    compute, arguments = OPERATIONS[operation]
    expected = compute(REFERENCE, *(moved(each, "cpu", torch.float32) for each in arguments))
    actual = compute(backend, *(moved(each, device, dtype) for each in arguments))
    assert actual.dtype is (dtype or torch.bfloat16)
    close = CLOSE if dtype is None else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(actual.cpu().float(), expected, **close)


def random_weights(out: int, width: int, limit: int) -> QuantizedWeights:
    values = torch.randint(-limit, limit + 1, (out, width), dtype=torch.int8)
    return QuantizedWeights(values, torch.rand(out) / width, torch.randn(out), torch.randn(out))


def random_rows(count: int, width: int) -> QuantizedRows:
    values = torch.randint(0, 256, (count, width), dtype=torch.uint8)
    return QuantizedRows(values, torch.rand(count, 1), torch.randn(count, 1))


@pytest.mark.skipif(not cpu_has_int8(), reason="needs an x86 processor with AVX2")
@on_a_cpu
@given(**SHAPES, out=st.sampled_from([7, 64, 80, 192]))
@settings(max_examples=20, deadline=None)
def test_every_backend_multiplies_bytes_as_the_plain_one(backend, count, width, out) -> None:
    torch.manual_seed(count + width)
    rows, weights = random_rows(count, width), random_weights(out, width, backend.int8_weight_limit)
    for activation in ACTIVATIONS:
        expected = REFERENCE.int8_gemm(weights, torch.float32, activation)(rows)
        actual = backend.int8_gemm(weights, torch.float32, activation)(rows)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        shorter = backend.int8_gemm(weights, torch.bfloat16, activation)(rows)
        torch.testing.assert_close(shorter, expected.bfloat16(), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize(
    "compute",
    [dequantize, *(partial(dequantize_by, library=each) for each in LIBRARIES)],
    ids=["torch", *NAMES_OF_LIBRARIES],
)
@torch.inference_mode()
def test_a_product_by_another_library_becomes_what_it_stands_for(compute) -> None:
    rows, weights = random_rows(9, 64), random_weights(48, 64, 127)
    product = (rows.values.float() @ weights.values.float().t()) * weights.scale
    expected = REFERENCE.int8_gemm(weights, torch.float32, "gelu")(rows)
    actual = compute(product, rows, weights, torch.float32, "gelu")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        (None, lambda x: x),
        ("gelu", functional.gelu),
        ("gelu_new", lambda x: functional.gelu(x, approximate="tanh")),
        ("relu", functional.relu),
    ],
)
@on_a_cpu
@torch.inference_mode()
def test_layers_that_read_the_same_input_stand_side_by_side(backend, activation, function) -> None:
    layers = [random_layer(32, out) for out in (32, 16, 48)]
    states = random(5, 32)
    actual = backend.linear(layers, activation)(states)
    expected = torch.cat([function(layer(states)) for layer in layers], dim=1)
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("backend", [torch_backend(), onednn_backend(torch.float32)])
def test_a_single_layer_in_float32_keeps_its_weights_where_they_are(backend: Backend) -> None:
    layer = random_layer(32, 32, torch.float32)
    compute = backend.linear([layer])
    with torch.inference_mode():
        layer.weight.zero_()
        layer.bias.fill_(3)
        assert (compute(torch.randn(2, 32)) == 3).all()


def exact_layer_norm(norm: LayerNorm, total: Tensor) -> Tensor:
    mean, variance = total.mean(1, keepdim=True), total.var(1, keepdim=True, correction=0)
    return (total - mean) / (variance + norm.epsilon).sqrt() * norm.weight + norm.bias


@on_a_cpu
@given(count=st.integers(1, 70), width=st.integers(16, 300))
@settings(max_examples=40, deadline=None)
def test_a_sum_is_normalised(backend: Backend, count: int, width: int) -> None:
    norm = random_layer_norm(width)
    states, residual = random(count, width) * 3, random(count + 1, width)[1:] * 3
    expected = exact_layer_norm(norm, states.double() + residual.double())
    actual = backend.add_norm(states.clone(), residual, norm)
    # PyTorch rounds the sum before it is normalised.
    torch.testing.assert_close(actual.double(), expected, rtol=0.03, atol=0.03)


def exact_rms_norm(states: Tensor, norm: RmsNorm) -> Tensor:
    states = states.double()
    size = (states.square().mean(-1, keepdim=True) + norm.epsilon).sqrt()
    return states / size * norm.weight.double()


@on_a_cpu
@given(count=st.integers(1, 40), width=st.integers(1, 300), size=st.sampled_from([1e-3, 1, 50]))
@settings(max_examples=40, deadline=None)
def test_rows_are_divided_by_the_root_of_their_mean_square(backend, count, width, size) -> None:
    states, norm = random(count, width) * size, RmsNorm(random(width), 1e-6)
    actual = backend.rms_norm(states, norm)
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual.double(), exact_rms_norm(states, norm), **CLOSE)


@on_a_cpu
@given(
    positions=st.lists(st.integers(0, 40_000), min_size=1, max_size=30),
    heads=st.integers(1, 5),
    others=st.integers(0, 3),
    half=st.integers(1, 70),
)
@settings(max_examples=40, deadline=None)
def test_heads_are_normalised_and_rotated(backend, positions, heads, others, half) -> None:
    states = random(len(positions), heads + others, 2 * half)
    before, norm = states.clone(), RmsNorm(random(heads, 2 * half), 1e-6)
    backend.rotary(states, norm, RotaryEmbedding.at(torch.tensor(positions), 2 * half, 1e6))
    frequencies = 1e6 ** -(torch.arange(half).double() / half)
    rotation = torch.polar(
        torch.ones(len(positions), half).double(), torch.tensor(positions)[:, None] * frequencies
    )
    first, second = exact_rms_norm(before[:, :heads], norm).chunk(2, dim=-1)
    rotated = torch.complex(first, second) * rotation[:, None]
    # An angle of 40,000 in float32 is known to 0.002.
    torch.testing.assert_close(
        states[:, :heads].double(),
        torch.cat([rotated.real, rotated.imag], -1),
        rtol=0.02,
        atol=0.05,
    )
    assert torch.equal(states[:, heads:], before[:, heads:])


@on_a_cpu
@given(count=st.integers(1, 40), half=st.integers(1, 300), size=st.sampled_from([0.1, 1, 100]))
@settings(max_examples=40, deadline=None)
def test_one_half_of_a_row_gates_the_other(backend: Backend, count, half, size) -> None:
    states = random(count, 2 * half) * size
    gate, through = states.double().chunk(2, dim=-1)
    actual = backend.gate(states, "silu").double()
    torch.testing.assert_close(actual, functional.silu(gate) * through, **CLOSE)


@on_a_cpu
@pytest.mark.parametrize(
    ("activation", "most"),
    [("silu", 3e38), ("relu", 3e38), ("gelu", 1e9), ("gelu_pytorch_tanh", 1e9)],
)
def test_a_gate_of_large_numbers_is_shut_or_open(backend: Backend, activation, most) -> None:
    gate = torch.tensor([-most, -200.0, -90.0, 0.0, 90.0, most] + [0.0] * 10)
    states = torch.cat([gate, torch.ones(16)])[None].bfloat16()
    expected = gate.clamp(min=0)[None].bfloat16()
    torch.testing.assert_close(backend.gate(states, activation), expected)


@on_a_cpu
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_number_that_is_not_finite_stays_in_its_row(backend: Backend, odd: float) -> None:
    states = random(4, 64)
    states[1, 3] = odd
    for result in (
        backend.linear([random_layer(64, 64)], "gelu")(states),
        backend.add_norm(states.clone(), random(5, 64)[1:], random_layer_norm(64)),
        backend.rms_norm(states, RmsNorm(random(64), 1e-6)),
        backend.gate(states, "silu"),
    ):
        assert result.isfinite().all(1).tolist() == [True, False, True, True]


def rows_of_any_size(count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different size, each off its middle."""
    torch.manual_seed(count * width)
    rows = torch.randn(count, width) + torch.randn(count, 1)
    return (rows * torch.logspace(-2, 2, count)[:, None]).to(dtype)


def plain_columns(factors: Tensor) -> Columns:
    """One for each channel."""
    none = torch.empty(0, dtype=torch.int32)
    return Columns(factors, none, torch.full((len(factors),), 0.5))


def restored(rows: QuantizedRows) -> Tensor:
    return rows.values.float() * rows.scale + rows.minimum


@on_a_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(**SHAPES)
@settings(max_examples=30, deadline=None)
def test_a_row_has_255_steps_of_its_own_range(backend: Backend, dtype, count, width) -> None:
    states, factors = rows_of_any_size(count, width, dtype), torch.rand(width) + 0.1
    rows = backend.quantize_rows(states, plain_columns(factors))
    wanted = states.float() * factors
    spread = wanted.amax(1, keepdim=True) - wanted.amin(1, keepdim=True)
    assert ((restored(rows) - wanted).abs() <= 0.501 * spread / 255 + 1e-6).all()


@on_a_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 36])
def test_the_columns_of_a_channel_are_together_finer_than_one(backend, dtype, width) -> None:
    states, channel, count = rows_of_any_size(40, width, dtype), 5, 17
    factors, repeated = torch.ones(width), torch.full((count - 1,), channel, dtype=torch.int32)
    places = torch.arange(float(count))
    offsets = torch.cat([torch.full((width,), 0.5), (places[1:] + 0.5) / count])
    offsets[channel] = 0.5 / count
    rows = backend.quantize_rows(states, Columns(factors, repeated, offsets))
    of_channel = restored(rows)[:, [channel, *range(width, width + count - 1)]].double()
    wanted = states[:, channel].double()
    spread = (states.amax(1) - states.amin(1)).double()
    assert ((of_channel.mean(1) - wanted).abs() <= 0.51 * spread / 255 / count + 1e-5).all()


@on_a_cpu
@pytest.mark.parametrize("width", [32, 36])
@pytest.mark.parametrize("fill", [0.0, -0.17, 5.0])
def test_a_row_of_one_value_is_that_value(backend: Backend, fill: float, width: int) -> None:
    states = torch.full((2, width), fill)
    rows = backend.quantize_rows(states, plain_columns(torch.full((width,), 2.0)))
    torch.testing.assert_close(restored(rows), 2 * states)


@on_a_cpu
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_quantized_row_with_a_number_that_is_not_finite_stays_so(backend, odd: float) -> None:
    states = random(4, 64)
    states[1, 3] = odd
    restored_rows = restored(backend.quantize_rows(states, plain_columns(torch.ones(64))))
    assert restored_rows.isfinite().any(1).tolist() == [True, False, True, True]
