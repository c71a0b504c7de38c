"""Packing: every token once, positions restarted, and the way back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.models import batch as length_classes
from smart_embedder.models.batch import (
    SECOND_SEGMENT,
    UNATTENDED,
    WITHOUT_VECTOR,
    PositionScheme,
    divide_lengths,
    find_shared_prefixes,
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


@given(SEQUENCES)
def test_every_sequence_is_found_again_where_unpack_order_says(sequences) -> None:
    packed = pack(sequences, device=CPU)
    for index, ids in enumerate(sequences):
        place = packed.unpack_order[index]
        span = slice(packed.offsets[place], packed.offsets[place + 1])
        np.testing.assert_array_equal(packed.input_ids[0, span], ids)
        np.testing.assert_array_equal(packed.position_ids[0, span], np.arange(len(ids)))


LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 32))
def test_blocks_cover_every_sequence_that_was_given(lengths, multiple) -> None:
    packed = pack([np.arange(n) for n in lengths], device=CPU, multiple=multiple)
    blocks = packed.blocks
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
    assert blocks[-1].stop == packed.real_tokens == sum(lengths)
    count = sum(
        each.padding.count if each.padding else (each.stop - each.start) // each.length
        for each in blocks
    )
    assert count == len(lengths)


@given(LENGTHS)
def test_a_group_pads_short_sequences_and_finds_their_tokens_again(lengths) -> None:
    packed = pack([np.full(n, n) for n in lengths], device=CPU)
    for block in packed.blocks:
        inside = packed.input_ids[0, block.start : block.stop]
        padding = block.padding
        if padding is None:
            assert set(inside.tolist()) == {block.length}
            continue
        assert padding.length <= 64
        assert inside.min() > padding.length - 16
        assert padding.tokens.tolist() == list(range(block.start, block.stop))
        padded = packed.input_ids[0, padding.token_of_slot]
        assert padded[padding.slots].tolist() == inside.tolist()
        hidden = torch.isinf(padding.mask).view(-1)
        assert (~hidden).nonzero().squeeze(1).tolist() == padding.slots.tolist()


@given(SEQUENCES)
def test_roberta_positions_are_those_that_transformers_derives(sequences) -> None:
    packed = pack(sequences, device=CPU, positions=PositionScheme(roberta_padding=1))
    for index, ids in enumerate(sequences):
        place = packed.unpack_order[index]
        span = slice(packed.offsets[place], packed.offsets[place + 1])
        real = (ids != 1).astype(np.int64)
        np.testing.assert_array_equal(packed.position_ids[0, span], np.cumsum(real) * real + 1)


@given(SEQUENCES, st.integers(1, 16))
def test_the_row_is_rounded_up_by_a_sequence_that_nobody_asked_for(sequences, multiple) -> None:
    plain, rounded = pack(sequences, device=CPU), pack(sequences, device=CPU, multiple=multiple)
    assert rounded.tokens % multiple == 0
    assert rounded.tokens - plain.tokens < multiple
    assert rounded.lengths[: len(sequences)] == plain.lengths
    np.testing.assert_array_equal(rounded.unpack_order, plain.unpack_order)


def test_marks_are_read_and_taken_off() -> None:
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
    one = pack([np.array([4, 4 | UNATTENDED])], device=CPU)
    assert one.attended.tolist() == [True, False]
    plain = pack([np.array([4])], device=CPU)
    assert plain.partly_attended is None
    assert plain.attended.tolist() == [True]


def test_what_sequences_of_a_causal_model_share_is_computed_once() -> None:
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
        lambda texts: any(wanted for _, wanted in texts)
    ),
    st.integers(1, 7),
)
def test_the_tokens_of_some_sequences_lie_side_by_side(texts, multiple) -> None:
    wanted = [want for _, want in texts]
    packed = pack([np.full(n, place) for place, (n, _) in enumerate(texts)], device=CPU)
    tokens, token_spans = select_tokens(packed, wanted, lambda _: multiple)
    rows = packed.input_ids[0] if tokens is None else packed.input_ids[0, tokens]
    indices, spans = select_sequences(packed, wanted)
    assert all(wanted) or len(rows) % multiple == 0
    assert all(wanted) or len(rows) - sum(n for n, want in texts if want) < multiple
    for place, (length, want) in enumerate(texts):
        if want:
            assert rows[token_spans[place]].tolist() == [place] * length
            (index,) = indices[spans[place]]
            assert packed.input_ids[0, packed.offsets[index]] == place
        else:
            assert all(wanted) or (token_spans[place], spans[place]) == (None, None)


@pytest.mark.parametrize(
    ("lengths", "blocks"),
    [
        ([1, 16], ["2 padded to 16"]),
        ([16, 17], ["1 of 16", "1 of 17"]),
        ([49, 64], ["2 padded to 64"]),
        ([64, 65, 65, 66], ["1 of 64", "2 of 65", "1 of 66"]),
        ([3, 3, 3], ["3 of 3"]),
    ],
)
def test_short_sequences_of_similar_length_are_a_block_and_long_ones_of_equal(
    lengths, blocks
) -> None:
    assert [
        f"{each.padding.count} padded to {each.length}"
        if each.padding
        else f"{(each.stop - each.start) // each.length} of {each.length}"
        for each in pack([np.arange(n) for n in lengths], device=CPU).blocks
    ] == blocks


def test_classes_of_lengths_begin_their_own_sequences_at_zero(monkeypatch) -> None:
    monkeypatch.setattr(length_classes, "QUERIES_OF_A_BLOCK", 2)
    monkeypatch.setattr(length_classes, "WORTH_A_CALL", 0)
    # The one in the middle begins after as many tokens as follow it.
    packed = pack([np.arange(n) for n in (*[1] * 9, 3, 3, 9)], device=CPU)
    assert len(packed.length_classes) == 3
    assert packed.pairs == sum(each**2 for each in packed.lengths)
    lengths = [each.bounds.diff().tolist() for each in packed.length_classes]
    assert [length for each in lengths for length in each] == packed.lengths
    assert all(each.bounds[0] == 0 for each in packed.length_classes)
    assert [each.longest for each in packed.length_classes] == list(map(max, lengths))
    (whole,) = pack([np.arange(3)], device=CPU).length_classes
    assert whole.bounds.tolist() == [0, 3]


def test_cu_seqlens_is_int32_as_varlen_kernels_want_it() -> None:
    packed = pack([np.arange(3), np.arange(1)], device=CPU)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.tolist() == [0, 1, 4]
    assert packed.max_length == 3


MANY_LENGTHS = st.lists(
    st.integers(1, 600) | st.sampled_from([5000, 32_768]), min_size=1, max_size=400
)


def started(lengths: list[int]) -> int:
    """What a call starts for each head."""
    return len(lengths) * -(-max(lengths) // 128)


def cost(lengths: list[int], classes: list[slice]) -> int:
    return sum(256 + started(lengths[each]) for each in classes)


@given(MANY_LENGTHS)
def test_every_sequence_is_in_one_class_and_several_never_cost_more_than_one(lengths) -> None:
    lengths.sort()
    classes = divide_lengths(lengths)
    places = np.concatenate([np.arange(len(lengths))[each] for each in classes])
    assert places.tolist() == list(range(len(lengths)))
    assert cost(lengths, classes) <= cost(lengths, [slice(0, len(lengths))])


def test_texts_of_usual_lengths_are_one_class() -> None:
    assert divide_lengths(sorted(20 + 7 * n % 480 for n in range(64))) == [slice(0, 64)]


def test_one_long_text_beside_thousands_of_short_ones_does_not_multiply_their_blocks() -> None:
    lengths = [20] * 3000 + [8192]
    classes = divide_lengths(lengths)
    assert classes == [slice(0, 3000), slice(3000, 3001)]
    assert sum(started(lengths[each]) for each in classes) * 60 < started(lengths)


def test_no_call_has_more_sequences_than_a_grid_has_blocks() -> None:
    classes = divide_lengths([2] * 140_000)
    assert [each.start for each in classes] == [0, *(each.stop for each in classes[:-1])]
    assert classes[-1].stop == 140_000
    assert max(each.stop - each.start for each in classes) <= 65_535


FEW_TOKENS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=9)


def arrays(texts: list[list[int]]) -> list[np.ndarray]:
    return [np.array(text, np.int64) for text in texts]


def beginnings(texts: list[list[int]]) -> list[tuple[int, ...]]:
    """What each token's state depends on."""
    return [tuple(text[: place + 1]) for text in texts for place in range(len(text))]


@given(FEW_TOKENS)
def test_every_beginning_is_computed_once_or_nothing_is_shared(texts) -> None:
    all_of_them = beginnings(texts)
    places = find_shared_prefixes(arrays(texts))
    distinct = len(set(all_of_them))
    if places is None:
        assert distinct > 15 / 16 * len(all_of_them)
        return
    rows, spread = places
    assert len(rows) == distinct
    assert [all_of_them[row] for row in rows[spread]] == all_of_them


def test_large_and_small_ids_are_told_apart() -> None:
    rows, _ = find_shared_prefixes(arrays([[300_000, 1], [300_000, 2], [255, 1], [255, 2]]))
    assert len(rows) == 6
