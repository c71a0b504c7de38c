"""Every attention in PyTorch against its definition; those that the setting names."""

import math
import warnings
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smart_embedder.models import batch as blocks
from smart_embedder.models.attention import (
    Attention,
    PackedAttention,
    _flash_attention,
    eager,
    excluding_unattended,
    matmul,
    memory_efficient,
    sdpa,
    varlen,
)
from smart_embedder.models.batch import UNATTENDED, PackedBatch, pack

CPU = torch.device("cpu")


def by_hand(
    query, key, value, cu_seqlens, *, scale: float, causal: bool, reach: tuple[int, int] = (-1, -1)
) -> torch.Tensor:
    """Attention one sequence, one head and one query at a time, straight from its definition.

    A query attends to so many keys before and after its own as `reach` says; -1 is all of them.
    """
    left, right = reach
    heads, tokens, _ = query.shape
    group = heads // key.shape[0]
    output = torch.zeros(tokens, heads, value.shape[2])
    for start, stop in pairwise(cu_seqlens):
        for head in range(heads):
            for place in range(start, stop):
                first = start if left < 0 else max(start, place - left)
                last = stop if right < 0 else min(stop, place + right + 1)
                last = place + 1 if causal else last
                keys = key[head // group, first:last]
                weights = torch.softmax(keys @ query[head, place] * scale, dim=0)
                output[place, head] = weights @ value[head // group, first:last]
    return output


@pytest.fixture
def cuda_kernels_on_cpu():
    """The operators have no CPU kernels: give them some that follow their documentation."""

    def flash(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, _mask, *,
        scale, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert max_q == max_k == int(cu_q.diff().max())
        states = (states.transpose(0, 1) for states in (q, k, v))
        reach = tuple(
            -1 if each is None else each for each in (window_size_left, window_size_right)
        )
        output = by_hand(*states, cu_q.tolist(), scale=scale, causal=causal, reach=reach)
        empty = q.new_empty(0)
        return output, empty, empty, empty, empty

    def efficient(q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, mask, log_sum=False, *, scale):
        assert q.shape[2] == k.shape[2] == v.shape[2]
        states = (q[0], k[0], v[0])
        output, *_ = flash(*states, cu_q, cu_k, max_q, max_k, 0.0, mask == 1, False, scale=scale)
        empty = q.new_empty(0)
        return output[None], empty, empty, empty, max_q, max_k

    operators = torch.library.Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # One says that it replaces a kernel.
        operators.impl("_flash_attention_forward", flash, allow_override=True)
        operators.impl("_efficient_attention_forward", efficient, allow_override=True)
    yield
    operators._destroy()


def random_case(
    lengths: list[int], heads: int, kv_heads: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], PackedBatch]:
    torch.manual_seed(sum(lengths))
    packed = pack([np.zeros(length, np.int64) for length in lengths], device=CPU)
    tokens = sum(lengths)
    states = tuple(torch.randn(count, tokens, 8) for count in (heads, kv_heads, kv_heads))
    return states, packed


def check(attend: Attention, lengths: list[int], kv_heads: int, *, causal: bool) -> None:
    states, packed = random_case(lengths, 4, kv_heads)
    scale = 1 / math.sqrt(8)
    actual = attend(states, packed, scale=scale, causal=causal)
    expected = by_hand(*states, packed.offsets.tolist(), scale=scale, causal=causal)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


LENGTHS = st.lists(st.integers(1, 9) | st.integers(14, 18), min_size=1, max_size=6)


@pytest.mark.parametrize("attend", [eager, sdpa, matmul])
@given(lengths=LENGTHS, kv_heads=st.sampled_from([4, 2, 1]), causal=st.booleans())
@settings(max_examples=30)
def test_it_follows_the_definition(attend, lengths, kv_heads, causal) -> None:
    check(attend, lengths, kv_heads, causal=causal)


@pytest.mark.parametrize("attend", [eager, sdpa, matmul])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_stays_within_its_sequence(attend, causal, value) -> None:
    """Short ones of near lengths share a padded block, equal ones a dense one."""
    lengths = [3, 5, 5, 17, 18, 70, 70]
    states, packed = random_case(lengths, 4, 4)
    clean = attend(states, packed, scale=0.35, causal=causal)
    for poisoned in range(len(lengths)):
        start, stop = packed.offsets[poisoned], packed.offsets[poisoned + 1]
        damaged = tuple(state.clone() for state in states)
        for state in damaged:
            state[:, start] = value
        output = attend(damaged, packed, scale=0.35, causal=causal)
        assert not output[start:stop].isfinite().all()
        output[start:stop] = clean[start:stop]
        torch.testing.assert_close(output, clean)


@pytest.mark.parametrize("attend", [sdpa, matmul])
@pytest.mark.parametrize("causal", [False, True])
def test_what_rounds_the_row_up_gets_finite_states(attend, causal: bool) -> None:
    packed = pack([np.zeros(5, np.int64)], device=CPU, multiple=32)
    states = [torch.randn(4, 32, 8) for _ in range(3)]
    output = attend(states, packed, scale=1.0, causal=causal)
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("attend", [varlen, memory_efficient])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("cost_of_a_call", [256, 0])
def test_kernels_for_packed_sequences_are_called_as_their_documentation_says(
    cuda_kernels_on_cpu, monkeypatch, attend, causal, kv_heads, cost_of_a_call
) -> None:
    """In one call, and in one for each class of lengths where that costs nothing."""
    monkeypatch.setattr(blocks, "QUERIES_OF_A_BLOCK", 2)
    monkeypatch.setattr(blocks, "WORTH_A_CALL", cost_of_a_call)
    check(attend, [3, 1, 7, 3, 1, 9], kv_heads, causal=causal)


def flash_attn_varlen_func(
    q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size
):
    """That of the package flash-attn, by its documentation."""
    states = (states.transpose(0, 1) for states in (q, k, v))
    return by_hand(*states, cu_q.tolist(), scale=softmax_scale, causal=causal, reach=window_size)


@pytest.mark.usefixtures("cuda_kernels_on_cpu")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attend", [varlen, partial(_flash_attention, flash_attn_varlen_func)])
@pytest.mark.parametrize("wrap", [lambda attend: attend, excluding_unattended])
def test_a_window_is_given_to_the_kernel_and_means_what_it_means_in_blocks(
    attend, causal, wrap
) -> None:
    states, packed = random_case([3, 7, 40], 4, 2)
    options = {"scale": 0.3, "causal": causal, "window": 5}
    in_blocks = PackedAttention(sdpa, packed)(states, **options)
    by_kernel = PackedAttention(wrap(attend), packed)
    torch.testing.assert_close(by_kernel(states, **options), in_blocks)
    assert by_kernel._takes_window
    everything = by_kernel(states, **options | {"window": None})
    torch.testing.assert_close(everything, sdpa(states, packed, scale=0.3, causal=causal))


@pytest.mark.parametrize("attend", [eager, sdpa, matmul])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_tokens_that_are_not_attended_to_attend_to_the_others(attend, causal, kv_heads) -> None:
    lengths, unattended = [1, 4, 6, 6, 7], [0, 1, 2, 5, 0]
    ids = [np.zeros(length, np.int64) for length in lengths]
    for each, count in zip(ids, unattended, strict=True):
        each[len(each) - count :] = UNATTENDED
    packed = pack(ids, device=CPU)
    states, _ = random_case(lengths, 4, kv_heads)
    actual = excluding_unattended(attend)(states, packed, scale=0.3, causal=causal)
    for start, length, count in zip(packed.offsets, lengths, unattended, strict=False):
        for last in range(length):
            # Beside the attended tokens alone, or, causally, those of them until itself.
            kept = [place for place in range(length - count) if not causal or place <= last]
            own = [state[:, start : start + length] for state in states]
            query, keys, values = own[0][:, [last]], own[1][:, kept], own[2][:, kept]
            weights = torch.softmax(
                query @ keys.repeat_interleave(4 // kv_heads, 0).mT * 0.3, dim=-1
            )
            expected = weights @ values.repeat_interleave(4 // kv_heads, 0)
            torch.testing.assert_close(actual[start + last], expected[:, 0])
