"""Packing keeps every token once, restarts positions, and can be undone."""

from itertools import accumulate, chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.kernels import packed_batch as length_classes
from smart_embedder.kernels.packed_batch import (
    SECOND_SEGMENT,
    UNATTENDED,
    WITHOUT_VECTOR,
    PositionScheme,
    divide_lengths,
    find_shared_prefixes,
    group_for_padding,
    pack,
    select_sequences,
    select_tokens,
)

CPU = torch.device("cpu")
SEQUENCES = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).map(lambda ids: np.array(ids, np.int64)),
    min_size=1,
    max_size=10,
)


@given(SEQUENCES, st.sampled_from([None, 1]))
def test_pack_keeps_every_sequence_and_its_familys_positions(
    sequences, padding: int | None
) -> None:
    packed = pack(sequences, device=CPU, positions=PositionScheme(roberta_padding=padding))
    for ids, index in zip(sequences, packed.unpack_order, strict=True):
        span = slice(packed.offsets[index], packed.offsets[index + 1])
        np.testing.assert_array_equal(packed.input_ids[0, span], ids)
        positions = np.arange(len(ids))
        if padding is not None:  # Positions as in transformers.
            positions = np.cumsum(ids != padding) * (ids != padding) + padding
        np.testing.assert_array_equal(packed.position_ids[0, span], positions)
    # Kernels for packed sequences need int32.
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.tolist() == packed.offsets.tolist()
    assert packed.max_length == max(map(len, sequences))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(1, 32))
def test_blocks_cover_every_sequence_and_pad_short_ones(lengths, multiple) -> None:
    packed = pack([np.full(n, n) for n in lengths], device=CPU, multiple=multiple)
    blocks, count = packed.blocks, 0
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
    assert blocks[-1].stop == packed.real_tokens == sum(lengths)
    for block in blocks:
        inside = packed.input_ids[0, block.start : block.stop]
        padding = block.padding
        if padding is None:
            count += len(inside) // block.length
            assert set(inside.tolist()) == {block.length}
            continue
        count += padding.count
        assert inside.min() > padding.length - 16
        assert inside.max() == padding.length == block.length <= 64
        assert padding.tokens.tolist() == list(range(block.start, block.stop))
        padded = packed.input_ids[0, padding.token_of_slot]
        assert padded[padding.slots].tolist() == inside.tolist()
        hidden = torch.isinf(padding.mask).view(-1)
        assert (~hidden).nonzero().squeeze(1).tolist() == padding.slots.tolist()
    assert count == len(lengths)


@given(SEQUENCES, st.integers(1, 16))
def test_pack_rounds_up_by_a_further_sequence(sequences, multiple) -> None:
    plain, rounded = pack(sequences, device=CPU), pack(sequences, device=CPU, multiple=multiple)
    assert rounded.tokens % multiple == 0
    assert rounded.tokens - plain.tokens < multiple
    assert rounded.lengths[: len(sequences)] == plain.lengths
    np.testing.assert_array_equal(rounded.unpack_order, plain.unpack_order)


def test_pack_reads_and_removes_marks() -> None:
    """A pair of texts, a query with two tokens of expansion, and a plain text."""
    pair = np.array([7, 8, 9 | SECOND_SEGMENT, 2**27 | SECOND_SEGMENT | WITHOUT_VECTOR])
    query = np.array([5, 6 | UNATTENDED, 6 | UNATTENDED])
    positions = PositionScheme(segment_offset=100)
    packed = pack([pair, query, np.array([4])], device=CPU, positions=positions, multiple=6)
    assert packed.input_ids.tolist() == [[4, 5, 6, 6, 7, 8, 9, 2**27, 0, 0, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 0, 1, 2, 0, 1, 102, 103, 0, 1, 2, 3]]
    assert packed.attended.tolist() == [True, True, False, False] + [True] * 8
    assert (packed.real_tokens, packed.tokens) == (8, 12)
    padding = packed.partly_attended
    assert (padding.count, padding.length, padding.tokens.tolist()) == (1, 3, [1, 2, 3])
    query_alone = pack([np.array([4, 4 | UNATTENDED])], device=CPU)
    assert query_alone.attended.tolist() == [True, False]
    plain = pack([np.array([4])], device=CPU)
    assert plain.partly_attended is None
    assert plain.attended.tolist() == [True]


def test_causal_pack_shares_common_prefixes() -> None:
    sequences = [np.array([*range(40), last]) for last in (50, 60)]
    shared = pack(sequences, device=CPU, causal=True, multiple=16).sharing
    assert len(shared.unique) % 16 == 0
    assert len(shared.unique) < 2 * 41
    ids = pack(sequences, device=CPU, multiple=16).input_ids[0]
    assert torch.equal(ids[shared.unique][shared.inverse], ids)
    assert pack(sequences, device=CPU).sharing is None
    assert pack(sequences[:1], device=CPU, causal=True).sharing is None


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8).filter(
        lambda texts: any(is_selected for _, is_selected in texts)
    ),
    st.integers(1, 7),
)
def test_select_tokens_and_sequences_leave_no_gaps(texts, multiple) -> None:
    selected = [is_selected for _, is_selected in texts]
    packed = pack([np.full(n, number) for number, (n, _) in enumerate(texts)], device=CPU)
    tokens, token_spans = select_tokens(packed, selected, lambda _: multiple)
    rows = packed.input_ids[0] if tokens is None else packed.input_ids[0, tokens]
    indices, spans = select_sequences(packed, selected)
    assert all(selected) or len(rows) % multiple == 0
    num_selected = sum(length for length, is_selected in texts if is_selected)
    assert all(selected) or len(rows) - num_selected < multiple
    for number, (length, is_selected) in enumerate(texts):
        if is_selected:
            assert rows[token_spans[number]].tolist() == [number] * length
            (index,) = indices[spans[number]]
            assert packed.input_ids[0, packed.offsets[index]] == number
        else:
            assert all(selected) or (token_spans[number], spans[number]) == (None, None)


def test_length_classes_have_bounds_from_zero(monkeypatch) -> None:
    monkeypatch.setattr(length_classes, "QUERIES_PER_BLOCK", 2)
    monkeypatch.setattr(length_classes, "CALL_COST", 0)
    # The middle class begins after as many tokens as it has.
    packed = pack([np.arange(n) for n in (*[1] * 9, 3, 3, 9)], device=CPU)
    assert len(packed.length_classes) == 3
    assert packed.pairs == sum(length**2 for length in packed.lengths)
    lengths = [sequences.bounds.diff().tolist() for sequences in packed.length_classes]
    assert list(chain.from_iterable(lengths)) == packed.lengths
    assert all(sequences.bounds[0] == 0 for sequences in packed.length_classes)
    assert [sequences.longest for sequences in packed.length_classes] == list(map(max, lengths))
    (whole,) = pack([np.arange(3)], device=CPU).length_classes
    assert whole.bounds.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("lengths", "max_padding", "max_pairs", "groups"),
    [
        ([3], 0.0, 0, [1]),
        ([3, 3, 3], 0.0, 1000, [3]),
        ([3, 3, 4, 4, 5], 0.0, 1000, [2, 2, 1]),
        ([4, 5, 5, 5], 0.25, 1000, [4]),
        ([3, 5], 0.25, 1000, [2]),  # Padding is a quarter of the 8 tokens.
        ([2, 5], 0.25, 1000, [1, 1]),
        ([3, 5, 8, 8], 0.25, 1000, [2, 2]),
        ([3, 3, 3, 3], 0.25, 18, [2, 2]),  # Two texts of nine pairs each.
        ([3, 3, 3, 3], 0.25, 17, [1, 1, 1, 1]),
        ([9, 9], 0.25, 0, [1, 1]),
    ],
)
def test_group_for_padding_limits_padding_and_pairs(
    lengths, max_padding, max_pairs, groups
) -> None:
    found = list(group_for_padding(lengths, max_padding, max_pairs))
    assert found == [slice(*span) for span in pairwise(accumulate(groups, initial=0))]


@pytest.mark.parametrize(
    ("lengths", "borders"),
    [
        (sorted(20 + 7 * n % 480 for n in range(64)), [0, 64]),  # Usual lengths are one class.
        # A long sequence does not multiply the blocks of the others.
        ([20] * 3000 + [8192], [0, 3000, 3001]),
        ([2] * 140_000, [0, 65_535, 131_070, 140_000]),  # No grid has more blocks.
    ],
)
def test_divide_lengths_finds_the_lowest_cost(lengths: list[int], borders: list[int]) -> None:
    assert divide_lengths(lengths) == [slice(*span) for span in pairwise(borders)]


FEW_TOKENS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=9)


def arrays(texts: list[list[int]]) -> list[np.ndarray]:
    return [np.array(text, np.int64) for text in texts]


def prefixes(texts: list[list[int]]) -> list[tuple[int, ...]]:
    """Return the tokens that each token's state depends on."""
    return [tuple(text[:stop]) for text in texts for stop in range(1, len(text) + 1)]


@given(FEW_TOKENS)
def test_shared_prefixes_are_computed_once_or_not_shared(texts) -> None:
    all_prefixes = prefixes(texts)
    shared = find_shared_prefixes(arrays(texts))
    distinct = len(set(all_prefixes))
    if shared is None:
        assert distinct > 15 / 16 * len(all_prefixes)
        return
    unique, inverse = shared
    assert len(unique) == distinct
    assert [all_prefixes[token] for token in unique[inverse]] == all_prefixes


def test_shared_prefixes_distinguish_large_and_small_ids() -> None:
    unique, _ = find_shared_prefixes(arrays([[300_000, 1], [300_000, 2], [255, 1], [255, 2]]))
    assert len(unique) == 6
