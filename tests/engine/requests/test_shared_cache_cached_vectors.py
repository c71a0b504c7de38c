"""The entries of a cache: split by kind, joined again, and believed only where they can be true."""

from dataclasses import replace

import numpy as np
import pytest

from smart_embedder.engine.records import Outputs, SparseVector, TextEmbedding, TokenizedText
from smart_embedder.engine.requests.shared_cache import (
    CachedVectors,
    join,
    kinds_of,
    of_one_text,
    problem_of,
    split,
)
from tests.engine.fakes import FakeModel

TEXT = TokenizedText(np.array([3, 1, 2], np.int64), 5, exact=False)
SPARSE = SparseVector(np.array([1, 2, 9]), np.float32([0.5, 1, 2]))
DENSE = np.float32([0.6, 0.8])
ROWS = np.float32([[1, 0], [0, 1]])
STATES = np.float32([[1, 2, 3], [4, 5, 6], [7, 8, 9]])


def model() -> FakeModel:
    made = FakeModel()
    made.dense_width = made.colbert_width = 2
    made.states_width = 3
    return made


@pytest.mark.parametrize(
    "made",
    [
        TextEmbedding(DENSE, SPARSE, ROWS, STATES),
        TextEmbedding(dense=DENSE),
        TextEmbedding(sparse=SPARSE),
        TextEmbedding(colbert=ROWS, states=STATES),
    ],
)
def test_what_is_split_by_kind_is_joined_to_the_same(made: TextEmbedding) -> None:
    entries = split(TEXT, made)
    text, joined = join(entries)
    assert (text.ids.tolist(), text.original_tokens, text.exact) == ([3, 1, 2], 5, False)
    assert text.ids.dtype == np.int64
    for kind in ("dense", "colbert", "states"):
        expected, found = getattr(made, kind), getattr(joined, kind)
        assert (found is None) == (expected is None) == (kind not in entries)
        if found is not None:
            np.testing.assert_array_equal(found, expected)
    assert (joined.sparse is None) == (made.sparse is None)
    if joined.sparse is not None:
        assert joined.sparse.indices.tolist() == [1, 2, 9]
        assert joined.sparse.values.tolist() == [0.5, 1, 2]


def test_nobody_can_change_what_is_kept_and_it_is_no_view_of_a_batch() -> None:
    batch = np.float32([[0.6, 0.8], [1, 0]])
    entry = split(TEXT, TextEmbedding(dense=batch[0]))["dense"]
    for kept in (entry, entry.copied()):
        for array in (kept.ids, kept.arrays["dense"]):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 7
    copied = entry.copied()
    batch[0] = 0
    assert entry.arrays["dense"].tolist() == [0, 0]
    np.testing.assert_array_equal(copied.arrays["dense"], DENSE)
    assert (copied.original_tokens, copied.exact) == (5, False)


def test_an_entry_counts_its_arrays_its_tokens_and_what_is_around_them() -> None:
    kept = split(TEXT, TextEmbedding(DENSE, SPARSE))
    assert kept["dense"].nbytes == 8 + 12 + 1200
    assert kept["sparse"].nbytes == 24 + 12 + 12 + 1200


def test_the_kinds_that_are_wanted_are_named_in_one_order() -> None:
    assert kinds_of(Outputs(sparse=True, dense=True)) == ["dense", "sparse"]
    assert kinds_of(Outputs(states=True, colbert=True)) == ["colbert", "states"]
    assert kinds_of(Outputs()) == []


def test_kinds_are_of_one_text_where_its_tokens_are_the_same() -> None:
    first = split(TEXT, TextEmbedding(DENSE))["dense"]
    assert of_one_text([first])
    assert of_one_text([first, first.copied(), first])
    for other in (
        replace(first, ids=np.array([3, 1, 3], np.int32)),
        replace(first, ids=np.array([3, 1], np.int32)),
        replace(first, original_tokens=6),
        replace(first, exact=True),
    ):
        assert not of_one_text([first, first, other])


def entry(kind: str, *arrays: np.ndarray, ids=(3, 1, 2), original: int = 5) -> CachedVectors:
    names = ("indices", "values") if kind == "sparse" else (kind,)
    named = dict(zip(names, arrays, strict=True))
    return CachedVectors(np.array(ids, np.int32), original, True, named)


GOOD = {
    "dense": (DENSE,),
    "colbert": (ROWS,),
    "states": (STATES,),
    "sparse": (SPARSE.indices, SPARSE.values),
}


@pytest.mark.parametrize("kind", GOOD)
def test_what_the_model_makes_is_believed(kind: str) -> None:
    assert problem_of(entry(kind, *GOOD[kind]), kind, model()) is None
    assert problem_of(entry(kind, *GOOD[kind], original=3), kind, model()) is None
    # Where it begins with token 0, as bge-m3's do, which may have a weight.
    assert problem_of(entry(kind, *GOOD[kind], ids=(0, 1, 2)), kind, model()) is None
    first = entry("sparse", np.array([0, 2, (1 << 28) - 1]), SPARSE.values)
    assert problem_of(first, "sparse", model()) is None


BAD = [
    ("dense", entry("dense", DENSE, ids=(3, -1, 2)), "its tokens are not those of a text"),
    ("dense", entry("dense", DENSE, original=2), "its tokens are not those of a text"),
    ("dense", entry("dense", np.float32([0.6, np.nan])), "a number is not finite"),
    ("dense", entry("dense", np.float32([1, 0, 0])), "(1, 3) numbers are not the (1, 2)"),
    ("dense", entry("dense", np.float32([0, 0])), "a vector is zero"),
    ("dense", entry("dense", np.float32([0.6, 0.9])), "a vector has not unit length"),
    ("colbert", entry("colbert", ROWS[:1]), "(1, 2) numbers are not the (2, 2)"),
    ("colbert", entry("colbert", ROWS * 2), "a vector has not unit length"),
    ("colbert", entry("colbert", ROWS * [[1], [0]]), "a vector is zero"),
    ("states", entry("states", STATES[:2]), "(2, 3) numbers are not the (3, 3)"),
    ("sparse", entry("sparse", SPARSE.indices[:2], SPARSE.values), "not one weight for each"),
    ("sparse", entry("sparse", np.array([1, 9, 2]), SPARSE.values), "not ascending token ids"),
    ("sparse", entry("sparse", np.array([1, 2, 2]), SPARSE.values), "not ascending token ids"),
    ("sparse", entry("sparse", np.array([-1, 2, 9]), SPARSE.values), "not ascending token ids"),
    ("sparse", entry("sparse", np.array([1, 2, 1 << 28]), SPARSE.values), "not ascending token"),
    ("sparse", entry("sparse", SPARSE.indices, np.float32([1, 0, 1])), "a weight is not above"),
]


@pytest.mark.parametrize(("kind", "bad", "reason"), BAD, ids=[each[2] for each in BAD])
def test_what_the_model_cannot_have_made_is_not(kind, bad, reason) -> None:
    assert reason in str(problem_of(bad, kind, model()))


def test_a_model_that_does_not_normalise_may_make_any_dense_vector() -> None:
    made = model()
    made.normalizes = False
    assert problem_of(entry("dense", DENSE * 5), "dense", made) is None
    assert problem_of(entry("colbert", ROWS * 5), "colbert", made) is not None
    assert problem_of(entry("dense", DENSE * 1.009), "dense", model()) is None
