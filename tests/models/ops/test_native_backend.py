"""The kernels in C against the definitions, at the sizes where tiles, panels and tasks end."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from app.models.ops.arguments import LayerNorm
from app.models.ops.native_backend import NativeBackend
from app.models.ops.native_library import load_library
from app.models.ops.onednn_backend import OneDnnBackend

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the kernels are not built")
ACTIVATIONS = {None: lambda x: x, "gelu": functional.gelu, "relu": functional.relu}
SHAPES = {
    "rows": st.integers(1, 40) | st.sampled_from([766, 768, 769, 1000]),
    "depth": st.integers(1, 12).map(lambda n: 16 * n) | st.sampled_from([1024, 1040, 2064, 4096]),
    "panels": st.integers(1, 4),
    "activation": st.sampled_from(list(ACTIVATIONS)),
}


@pytest.fixture(scope="module")
def backend() -> NativeBackend:
    return NativeBackend(LIBRARY)


def layer_of(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(*reversed(weight.shape), device="meta")
    layer.load_state_dict({"weight": weight.bfloat16(), "bias": bias.bfloat16()}, assign=True)
    return layer


def random_layer(out: int, depth: int) -> nn.Linear:
    torch.manual_seed(out + depth)
    return layer_of(torch.randn(out, depth) / math.sqrt(depth), torch.randn(out))


@given(**SHAPES)
@settings(max_examples=60, deadline=None)
@torch.inference_mode()
def test_bfloat16_is_exact_to_its_last_digit(backend, rows, depth, panels, activation) -> None:
    layer = random_layer(64 * panels, depth)
    states = torch.randn(rows, depth).bfloat16()
    actual = backend.linear([layer], activation)(states)
    exact = functional.linear(states.double(), layer.weight.double(), layer.bias.double())
    expected = ACTIVATIONS[activation](exact)
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-5)


@given(**SHAPES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60, deadline=None)
def test_bytes_are_summed_up_exactly(backend, rows, depth, panels, activation, dtype) -> None:
    scale, bias = torch.rand(64 * panels) / depth, torch.randn(64 * panels)
    weight = torch.randint(-127, 128, (64 * panels, depth), dtype=torch.int8)
    values = torch.randint(0, 256, (rows, depth), dtype=torch.uint8)
    gemm = backend.int8_gemm(weight, scale, activation)
    actual = gemm(values, bias, dtype=dtype, activation=activation)
    exact = (values.double() @ weight.double().t()) * scale + bias
    expected = ACTIVATIONS[activation](exact)
    digits = 2**-8 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), expected, rtol=digits, atol=1e-5)


def test_the_largest_values_do_not_overflow(backend) -> None:
    weight = torch.full((64, 4096), -127, dtype=torch.int8)
    values = torch.full((7, 4096), 255, dtype=torch.uint8)
    actual = backend.int8_gemm(weight, torch.ones(64))(values)
    assert torch.equal(actual, torch.full((7, 64), -127.0 * 255 * 4096))


@torch.inference_mode()
def test_gelu_follows_its_definition_everywhere(backend) -> None:
    # One channel passes each number on, the bias of which is 0.
    numbers = torch.linspace(-12, 12, 6001).bfloat16()
    states = torch.zeros(len(numbers), 16, dtype=torch.bfloat16)
    states[:, 0] = numbers
    weight = torch.zeros(64, 16, dtype=torch.bfloat16)
    weight[:, 0] = 1
    gelu = backend.linear([layer_of(weight, torch.zeros(64))], "gelu")
    expected = functional.gelu(numbers.double())[:, None].expand(-1, 64)
    torch.testing.assert_close(gelu(states).double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@torch.inference_mode()
def test_any_number_of_threads_gives_the_same(backend, threads: int) -> None:
    linear = backend.linear([random_layer(192, 128)], "gelu")
    states = torch.randn(500, 128).bfloat16()
    before, alone = torch.get_num_threads(), linear(states)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(linear(states), alone)
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it(backend) -> None:
    linear = backend.linear([random_layer(64, 2048)])
    states = torch.randn(20, 2048).bfloat16()
    together = linear(states)
    assert torch.equal(torch.cat([linear(row[None]) for row in states]), together)


@given(count=st.integers(1, 70), width=st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_the_norm_of_a_sum_is_exact_to_the_last_digit_of_bfloat16(backend, count, width) -> None:
    torch.manual_seed(width)
    norm = LayerNorm(torch.randn(width), torch.randn(width), 1e-5)
    states, residual = (torch.randn(count, width).bfloat16() * 3 for _ in range(2))
    total = states.double() + residual.double()
    mean, variance = total.mean(1, keepdim=True), total.var(1, keepdim=True, correction=0)
    expected = (total - mean) / (variance + norm.epsilon).sqrt() * norm.weight + norm.bias
    actual = backend.add_norm(states.clone(), residual, norm)
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-3)


def test_states_with_gaps_are_refused(backend) -> None:
    states = torch.randn(4, 64).bfloat16()[:, ::2]
    with pytest.raises(ValueError, match="numbers without gaps"):
        backend.add_norm(states, states, LayerNorm(torch.ones(32), torch.zeros(32), 1e-5))


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize(
    ("out", "depth", "activation", "fits"),
    [
        (128, 48, "gelu", True),
        (96, 64, None, False),
        (64, 40, None, False),
        (64, 64, "gelu_new", False),
    ],
)
def test_other_shapes_and_activations_and_amx_are_left_to_onednn(
    monkeypatch, out, depth, activation, fits, amx
) -> None:
    taken = []
    monkeypatch.setattr(OneDnnBackend, "linear", lambda *arguments: taken.append(arguments))
    monkeypatch.setattr(OneDnnBackend, "int8_gemm", lambda *arguments: taken.append(arguments))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": amx})
    backend = NativeBackend(LIBRARY)
    backend.linear([random_layer(out, depth)], activation)
    backend.int8_gemm(torch.zeros(out, depth, dtype=torch.int8), torch.ones(out), activation)
    assert len(taken) == (0 if fits and not amx else 2)
