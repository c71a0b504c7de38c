"""Attention by two products in blocks of any size, against PyTorch's own in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from smart_embedder.models import attention as dense
from smart_embedder.models.attention import QueryKeyValue

HEADS, WIDTH = 4, 8


def random_states(count: int, length: int, dtype: torch.dtype) -> QueryKeyValue:
    """Views of one projection `[count x length, 3, heads, width]`, as the encoder gives them."""
    torch.manual_seed(count * length)
    projected = torch.randn(count, length, 3, HEADS, WIDTH, dtype=dtype)
    query, key, value = projected.permute(2, 0, 3, 1, 4)
    return query, key, value


def attend(states: QueryKeyValue, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
    output = torch.full(states[0].shape, math.nan, dtype=states[0].dtype)
    dense.attend_by_matmul(states, output, scale=scale, mask=mask)
    return output


@given(
    count=st.integers(1, 9),
    length=st.integers(1, 40),
    most_scores=st.integers(1, 4000),
    fewest=st.integers(1, 50),
    masked=st.booleans(),
)
@settings(max_examples=60)
def test_blocks_of_any_size_give_what_the_whole_gives(
    count, length, most_scores, fewest, masked
) -> None:
    states = random_states(count, length, torch.float32)
    mask = None
    if masked:
        lengths = torch.randint(1, length + 1, (count, 1, 1, 1))
        mask = torch.where(torch.arange(length) < lengths, 0.0, -torch.inf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "_MOST_SCORES", most_scores)
        patch.setattr(dense, "_FEWEST_QUERIES", fewest)
        patch.setattr(dense, "_FEW_SCORES", 0)
        actual = attend(states, 0.3, mask)
    exact = (each.double() for each in states)
    wide = None if mask is None else mask.double()
    expected = functional.scaled_dot_product_attention(*exact, attn_mask=wide, scale=0.3)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("most_scores", "fewest", "few", "products"),
    [
        (1200, 10, 2400, [1200] * 2),  # Three of the six texts, of 400 scores each, at once.
        (1199, 10, 2400, [800] * 3),
        (100, 10, 0, [100] * 24),  # A head of a text.
        (50, 10, 0, [50] * 48),
        (200, 5, 0, [200] * 12),  # Half of the queries of all heads.
        (1200, 10, 2401, []),  # As few scores are left to PyTorch's operator.
    ],
)
def test_no_more_scores_are_held_at_once_than_may_be(
    monkeypatch, most_scores, fewest, few, products
) -> None:
    states, held, multiply = random_states(6, 10, torch.float32), [], torch.bmm
    for name, value in {
        "_MOST_SCORES": most_scores,
        "_FEWEST_QUERIES": fewest,
        "_FEW_SCORES": few,
    }.items():
        monkeypatch.setattr(dense, name, value)

    def watched(left, right):
        held.append(multiply(left, right))
        return held[-1]

    monkeypatch.setattr(torch, "bmm", watched)
    attend(states, 0.3, None)
    # Each second one is that of the scores with the values.
    assert [product.numel() for product in held[::2]] == products


def test_few_scores_are_left_to_pytorch_and_come_out_the_same() -> None:
    states = random_states(2, 9, torch.float32)
    mask = torch.tensor([[0.0] * 9, [0.0] * 6 + [-torch.inf] * 3])[:, None, None]
    expected = functional.scaled_dot_product_attention(*states, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(attend(states, 0.3, mask), expected)


def test_bfloat16_costs_no_more_than_its_own_rounding() -> None:
    states = random_states(2, 300, torch.bfloat16)
    exact = (each.double() for each in states)
    expected = functional.scaled_dot_product_attention(*exact)
    actual = attend(states, WIDTH**-0.5, None).double()
    assert (actual - expected).norm() / expected.norm() < 2**-7
