"""Attention in C compared with its definition in float64, at sizes around those of its blocks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smart_embedder.kernels.attention import PackedAttention, QueryKeyValue, eager
from smart_embedder.kernels.native import native_backend
from smart_embedder.kernels.packed_batch import PackedBatch
from smart_embedder.kernels.target import with_attention
from tests.support.native import LIBRARIES, needs_kernels
from tests.support.packed_attention import by_definition, pack_lengths, random_states

pytestmark = [needs_kernels, pytest.mark.long]
DTYPES = [torch.float32, torch.bfloat16]
# In bfloat16 weights and output are rounded; in float32 scores of 50 are exact to 3e-6.
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2**-7}


def attend(
    states: QueryKeyValue,
    packed: PackedBatch,
    scale: float,
    *,
    causal: bool = False,
    window: int | None = None,
    library=None,
) -> torch.Tensor:
    backend = with_attention(native_backend(library or LIBRARIES[0], states[0].dtype), "native")
    attention = PackedAttention(backend.attention, packed)
    return attention(states, scale=scale, causal=causal, window=window)


def exactly(
    states: QueryKeyValue,
    packed: PackedBatch,
    scale: float,
    *,
    causal: bool = False,
    window: int | None = None,
) -> torch.Tensor:
    """Compute attention in float64 by its definition."""
    reach = (-1, -1) if window is None else (window - 1, window - 1)
    exact = (state.double() for state in states)
    return by_definition(exact, packed.offsets, scale, causal=causal, reach=reach)


def check(
    lengths: list[int],
    heads: int,
    width: int,
    scale: float,
    *,
    group: int = 1,
    causal: bool = False,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    packed = pack_lengths(lengths)
    states = random_states(packed.tokens, heads, width, group, dtype)
    options = {"causal": causal, "window": window}
    expected = exactly(states, packed, scale, **options)
    for library in LIBRARIES:
        actual = attend(states, packed, scale, **options, library=library)
        torch.testing.assert_close(actual.double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@given(
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=6),
    heads=st.integers(1, 5),
    width=st.sampled_from([16, 32, 48, 64, 80, 112, 128, 144, 256]),
    scale=st.sampled_from([0.02, 0.125, 1.0]),
    group=st.integers(1, 3),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=40)
def test_native_attention_follows_the_definition(
    lengths, heads, width, scale, group, causal, window, dtype
) -> None:
    check(lengths, heads, width, scale, group=group, causal=causal, window=window, dtype=dtype)


# Lengths around the ends of windows and of blocks of keys (512, or fewer in float32 or wide heads).
ENDS = [([3, length], 2, 64, None) for length in (512, 513, 1025)]
ENDS += [([1100], 1, 64, 1), ([1100], 1, 64, 257), ([1100], 1, 256, 700)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("lengths", "heads", "width", "window"), ENDS)
def test_native_attention_of_long_texts_across_blocks_and_windows(
    lengths, heads, width, window, causal, dtype
) -> None:
    check(lengths, heads, width, 0.125, causal=causal, window=window, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_masked_keys_have_no_weight(scale, causal, dtype) -> None:
    # After a key that is alone in its register, and after the last key of a causal query, the
    # scores are -infinity: 2 to the power of -infinity must be 0, and not NaN.
    packed = pack_lengths([1, 20])
    states = random_states(21, 2, 64, dtype=dtype)
    for library in LIBRARIES:
        output = attend(states, packed, scale, causal=causal, library=library)
        first = output[: 2 if causal else 1]
        torch.testing.assert_close(first, states[2].transpose(0, 1)[: len(first)])


@pytest.mark.parametrize("window", [None, 70])
def test_native_attention_has_the_same_bits_in_any_batch_and_on_any_threads(window) -> None:
    packed = pack_lengths([7, 40, 300, 600])
    states = random_states(packed.tokens, 3, 32)
    before, together = torch.get_num_threads(), attend(states, packed, 0.2, window=window)
    last = tuple(state[:, -600:] for state in states)
    assert torch.equal(attend(last, pack_lengths([600]), 0.2, window=window), together[-600:])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(attend(states, packed, 0.2, window=window), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("length", [40, 700])
@pytest.mark.parametrize("size", [1e4, 0.0], ids=["large", "equal"])
def test_softmax_of_large_and_of_equal_scores(size: float, length: int) -> None:
    packed = pack_lengths([length])
    query, key, value = random_states(length, 2, 64)
    states = (query, key * size, value)
    actual = attend(states, packed, 1.0)
    expected = exactly(states, packed, 1.0)
    torch.testing.assert_close(actual.double(), expected, rtol=2**-6, atol=2**-6)


def test_tokens_that_round_up_are_zero() -> None:
    packed = pack_lengths([5], multiple=32)
    output = attend(random_states(32, 2, 16), packed, 1.0)
    assert not output[5:].any()
    assert output[:5].any()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_unsupported_head_width_is_left_to_pytorch(causal: bool, window: int | None) -> None:
    packed = pack_lengths([3, 12, 12])
    states = tuple(torch.randn(4, 27, 24).bfloat16() for _ in range(3))
    expected = PackedAttention(eager, packed)(states, scale=0.3, causal=causal, window=window)
    actual = attend(states, packed, 0.3, causal=causal, window=window)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("causal", [False, True])
def test_nan_stays_within_its_sequence_and_head(causal: bool) -> None:
    packed = pack_lengths([3, 17, 17, 70], multiple=32)
    states = random_states(packed.tokens, 2, 32)
    clean = attend(states, packed, 0.2, causal=causal)
    for poisoned in range(4):
        start, stop = packed.offsets[poisoned], packed.offsets[poisoned + 1]
        damaged = tuple(state.clone() for state in states)
        for state in damaged:
            state[1, start] = math.nan
        output = attend(damaged, packed, 0.2, causal=causal)
        assert output[start:stop, 1].isnan().all()
        output[start:stop, 1] = clean[start:stop, 1]
        torch.testing.assert_close(output, clean)
