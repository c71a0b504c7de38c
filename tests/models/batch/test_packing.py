"""Packing: every token once, positions restarted, and the way back."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.models.batch.blocks import DenseBlock
from app.models.batch.packing import pack
from app.models.batch.position_ids import PositionScheme

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
    dense = [block if isinstance(block, DenseBlock) else block.padding for block in blocks]
    assert sum(block.count for block in dense) == len(lengths)


@given(LENGTHS)
def test_a_group_pads_short_sequences_and_finds_their_tokens_again(lengths) -> None:
    packed = pack([np.full(n, n) for n in lengths], device=CPU)
    for block in packed.blocks:
        inside = packed.input_ids[0, block.start : block.stop]
        if isinstance(block, DenseBlock):
            assert inside.tolist() == [block.length] * block.count * block.length
            continue
        padding = block.padding
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


def test_cu_seqlens_is_int32_as_varlen_kernels_want_it() -> None:
    packed = pack([np.arange(3), np.arange(1)], device=CPU)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.tolist() == [0, 1, 4]
    assert packed.max_length == 3
