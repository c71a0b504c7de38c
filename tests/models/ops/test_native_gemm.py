"""Products in C against their definition, at the sizes where tiles, panels and parts end."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from app.models.ops import native_gemm as native_products
from app.models.ops.native_library import load_library

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the kernels are not built")
ACTIVATIONS = {None: lambda x: x, "gelu": functional.gelu, "relu": functional.relu}
SHAPES = {
    "rows": st.integers(1, 40) | st.sampled_from([766, 768, 769, 1000]),
    "depth": st.integers(1, 12).map(lambda n: 16 * n) | st.sampled_from([1024, 1040, 2064, 4096]),
    "panels": st.integers(1, 4),
    "activation": st.sampled_from(list(ACTIVATIONS)),
}


def random_layer(columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(columns + depth)
    return torch.randn(columns, depth) / math.sqrt(depth), torch.randn(columns)


@given(**SHAPES)
@settings(max_examples=60, deadline=None)
def test_bfloat16_is_exact_to_its_last_digit(rows, depth, panels, activation) -> None:
    weight, bias = (each.bfloat16() for each in random_layer(64 * panels, depth))
    states = torch.randn(rows, depth).bfloat16()
    actual = native_products.make_linear(LIBRARY, weight, bias, activation)(states)
    exact = functional.linear(states.double(), weight.double(), bias.double())
    expected = ACTIVATIONS[activation](exact)
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-5)


@given(**SHAPES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60, deadline=None)
def test_levels_are_summed_up_exactly(rows, depth, panels, activation, dtype) -> None:
    scale, bias = torch.rand(64 * panels) / depth, torch.randn(64 * panels)
    weight = torch.randint(-127, 128, (64 * panels, depth), dtype=torch.int8)
    levels = torch.randint(0, 256, (rows, depth), dtype=torch.uint8)
    actual = native_products.multiply_levels(
        LIBRARY,
        levels,
        native_products.lay_out(weight),
        scale,
        bias,
        dtype=dtype,
        activation=activation,
    )
    exact = (levels.double() @ weight.double().t()) * scale + bias
    expected = ACTIVATIONS[activation](exact)
    digits = 2**-8 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), expected, rtol=digits, atol=1e-5)


def test_the_largest_levels_do_not_overflow() -> None:
    weight = torch.full((64, 4096), -127, dtype=torch.int8)
    levels = torch.full((7, 4096), 255, dtype=torch.uint8)
    ones, zeros = torch.ones(64), torch.zeros(64)
    actual = native_products.multiply_levels(
        LIBRARY,
        levels,
        native_products.lay_out(weight),
        ones,
        zeros,
        dtype=torch.float32,
        activation=None,
    )
    assert torch.equal(actual, torch.full((7, 64), -127.0 * 255 * 4096))


def test_gelu_follows_its_definition_everywhere() -> None:
    # One channel passes each number on, the bias of which is 0.
    numbers = torch.linspace(-12, 12, 6001).bfloat16()
    states = torch.zeros(len(numbers), 16, dtype=torch.bfloat16)
    states[:, 0] = numbers
    weight = torch.zeros(64, 16, dtype=torch.bfloat16)
    weight[:, 0] = 1
    gelu = native_products.make_linear(LIBRARY, weight, torch.zeros(64).bfloat16(), "gelu")
    expected = functional.gelu(numbers.double())[:, None].expand(-1, 64)
    torch.testing.assert_close(gelu(states).double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same(threads: int) -> None:
    weight, bias = (each.bfloat16() for each in random_layer(192, 128))
    linear = native_products.make_linear(LIBRARY, weight, bias, "gelu")
    states = torch.randn(500, 128).bfloat16()
    before, alone = torch.get_num_threads(), linear(states)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(linear(states), alone)
    finally:
        torch.set_num_threads(before)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    weight, bias = (each.bfloat16() for each in random_layer(64, 2048))
    linear = native_products.make_linear(LIBRARY, weight, bias, None)
    states = torch.randn(20, 2048).bfloat16()
    together = linear(states)
    assert torch.equal(torch.cat([linear(row[None]) for row in states]), together)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    weight, bias = (each.bfloat16() for each in random_layer(64, 64))
    states = torch.randn(5, 64).bfloat16()
    states[3, 7] = math.nan
    normed = native_products.make_linear(LIBRARY, weight, bias, "gelu")(states)
    assert normed.isnan().any(1).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("columns", "depth", "activation", "fitting"),
    [
        (128, 48, "gelu", True),
        (96, 64, None, False),
        (64, 40, None, False),
        (64, 64, "gelu_new", False),
    ],
)
def test_other_shapes_and_activations_are_left_to_onednn(
    columns, depth, activation, fitting
) -> None:
    assert native_products.fits(torch.Size((columns, depth)), activation) is fitting
