"""The norm of a sum in bfloat16: in C as by PyTorch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.models.ops.native_library import load_library
from app.models.ops.norm import Norm, make_sum_norm

needs_library = pytest.mark.skipif(load_library() is None, reason="the kernels are not built")


def random_norm(width: int) -> Norm:
    torch.manual_seed(width)
    return Norm(torch.randn(width), torch.randn(width), 1e-5)


def exact_norm(norm: Norm, total: torch.Tensor) -> torch.Tensor:
    mean, variance = total.mean(1, keepdim=True), total.var(1, keepdim=True, correction=0)
    return (total - mean) / (variance + norm.epsilon).sqrt() * norm.weight + norm.bias


@needs_library
@given(count=st.integers(1, 70), width=st.integers(1, 300))
@settings(max_examples=50)
def test_in_c_it_is_exact_to_the_last_digit_of_bfloat16(count: int, width: int) -> None:
    norm = random_norm(width)
    states, residual = (torch.randn(count, width).bfloat16() * 3 for _ in range(2))
    expected = exact_norm(norm, states.double() + residual.double())
    actual = make_sum_norm(norm, torch.bfloat16)(states.clone(), residual)
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_normalised(dtype) -> None:
    norm = random_norm(48)
    states, residual = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype)
    expected = norm((states + residual).float()).to(dtype)
    actual = make_sum_norm(norm, dtype)(states, residual)
    tolerance = {} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(actual, expected, **tolerance)


@needs_library
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_a_number_stays_in_its_row(odd: float) -> None:
    states = torch.randn(3, 32).bfloat16()
    states[1, 5] = odd
    normed = make_sum_norm(random_norm(32), torch.bfloat16)(states, torch.randn(3, 32).bfloat16())
    assert normed.isnan().any(1).tolist() == [False, True, False]


@needs_library
def test_states_with_gaps_are_refused() -> None:
    states = torch.randn(4, 64).bfloat16()[:, ::2]
    with pytest.raises(ValueError, match="numbers without gaps"):
        make_sum_norm(random_norm(32), torch.bfloat16)(states, states)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("meta", torch.bfloat16)])
def test_where_the_kernels_are_of_no_use_nobody_looks_for_them(monkeypatch, device, dtype) -> None:
    monkeypatch.setattr("app.models.ops.norm.load_library", pytest.fail)
    plain = Norm(torch.ones(8, device=device), torch.zeros(8, device=device), 1e-5)
    assert make_sum_norm(plain, dtype) == plain.of_sum
