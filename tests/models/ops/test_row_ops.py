"""The kernels in C against PyTorch's operators, and both against the definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.models.ops.native_library import load_library
from app.models.ops.native_rows import NativeRows, choose_rows
from app.models.ops.norm import Norm
from app.models.ops.row_ops import Ending, PyTorchRows, Rows

LIBRARY = load_library()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="the kernels are not built")
EVERY = [
    pytest.param(PyTorchRows(), id="pytorch"),
    pytest.param(NativeRows(LIBRARY), id="native", marks=needs_library),  # type: ignore[arg-type]
]
SHAPES = {"count": st.integers(1, 70), "width": st.integers(1, 20).map(lambda n: 16 * n)}
HIGHEST = 256 - 2**-16


def random_rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different size, each off its middle."""
    torch.manual_seed(count * width)
    rows = torch.randn(count, width) + torch.randn(count, 1)
    return (rows * torch.logspace(-2, 2, count)[:, None]).to(dtype)


@pytest.mark.parametrize("rows", EVERY)
@given(**SHAPES)
@settings(max_examples=30)
def test_levels_are_cut_down_and_rows_beyond_them_are_named(rows: Rows, count, width) -> None:
    states = torch.randn(count, width) * 40 + 128.5
    rounded = rows.round_levels(states, 1.0, HIGHEST)
    expected = states.double().clamp(1, HIGHEST).floor()
    assert torch.equal(rounded.levels.double(), expected)
    assert torch.equal(rounded.far, ((states < 1) | (states > HIGHEST)).any(1))


@pytest.mark.parametrize("rows", EVERY)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 256.0, 0.99])
def test_one_number_beyond_the_levels_makes_a_row_far(rows: Rows, odd: float) -> None:
    states = torch.full((3, 32), 128.5)
    states[1, 7] = odd
    assert rows.round_levels(states, 1.0, HIGHEST).far.tolist() == [False, True, False]


@pytest.mark.parametrize("rows", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(**SHAPES)
@settings(max_examples=30)
def test_a_row_has_255_levels_of_its_own_range(rows: Rows, dtype, count, width) -> None:
    states = random_rows(count, width, dtype)
    rounded = rows.round_rows(states)
    restored = rounded.levels.float() * rounded.scale + rounded.minimum
    spread = states.float().amax(1, keepdim=True) - states.float().amin(1, keepdim=True)
    assert ((restored - states.float()).abs() <= 0.501 * spread / 255 + 1e-6).all()


@pytest.mark.parametrize("rows", EVERY)
@pytest.mark.parametrize("fill", [0.0, -0.17, 5.0])
def test_a_row_of_one_value_has_one_level(rows: Rows, fill: float) -> None:
    rounded = rows.round_rows(torch.full((2, 32), fill))
    restored = rounded.levels.float() * rounded.scale + rounded.minimum
    torch.testing.assert_close(restored, torch.full((2, 32), fill))


@pytest.mark.parametrize("rows", EVERY)
@given(**SHAPES)
@settings(max_examples=30)
def test_a_product_and_its_residual_are_added_and_normalised(rows: Rows, count, width) -> None:
    states, product, residual = (random_rows(count, width) for _ in range(3))
    rounded = rows.round_rows(states)
    sums, unit, constant, weight, bias = torch.randn(5, width)
    ending = Ending(sums, unit, constant, Norm(weight, bias, 1e-5))
    exact = product.double() * rounded.scale + rounded.minimum * sums + residual * unit + constant
    mean, variance = exact.mean(1, keepdim=True), exact.var(1, keepdim=True, correction=0)
    expected = (exact - mean) / (variance + 1e-5).sqrt() * weight + bias
    actual = rows.norm_product(product.clone(), rounded, residual, ending)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", EVERY)
def test_what_is_not_a_number_stays_that(rows: Rows) -> None:
    rounded = rows.round_rows(torch.ones(2, 16))
    product = torch.ones(2, 16)
    product[1, 3] = math.nan
    ones = torch.ones(16)
    ending = Ending(ones, ones, ones, Norm(ones, ones, 1e-5))
    normed = rows.norm_product(product, rounded, torch.ones(2, 16), ending)
    assert normed.isnan().any(1).tolist() == [False, True]


@needs_library
@pytest.mark.parametrize(("widths", "kind"), [((1024, 64), NativeRows), ((64, 40), PyTorchRows)])
def test_widths_that_fill_no_register_are_left_to_pytorch(widths, kind) -> None:
    assert isinstance(choose_rows(*widths), kind)
