"""Which sequences share a call of attention."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.models.batch.blocks import divide_lengths

LENGTHS = st.lists(st.integers(1, 600) | st.sampled_from([5000, 32_768]), min_size=1, max_size=400)


def blocks(lengths: list[int]) -> int:
    """What a call starts for each head."""
    return len(lengths) * -(-max(lengths) // 128)


def cost(lengths: list[int], classes: list[slice]) -> int:
    return sum(256 + blocks(lengths[each]) for each in classes)


@given(LENGTHS)
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
    assert sum(blocks(lengths[each]) for each in classes) * 60 < blocks(lengths)


def test_no_call_has_more_sequences_than_a_grid_has_blocks() -> None:
    classes = divide_lengths([2] * 140_000)
    assert [each.start for each in classes] == [0, *(each.stop for each in classes[:-1])]
    assert classes[-1].stop == 140_000
    assert max(each.stop - each.start for each in classes) <= 65_535
