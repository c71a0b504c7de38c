"""What a model makes of the canaries is compared with what it made at its first start."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from structlog.testing import capture_logs

from smart_embedder.engine.canaries import CANARIES, KindCanaries, canaries_of, drift
from smart_embedder.engine.records import SparseVector, TextEmbedding
from smart_embedder.engine.space import VectorSpace

SPACE = VectorSpace("dense", *8 * ["a"])
ROWS = np.eye(len(CANARIES), dtype=np.float32)
numbers = arrays(np.float32, (3, 4), elements=st.floats(-2, 2, width=32))
weights = st.dictionaries(st.integers(0, 9), st.floats(0.125, 2, width=32))


def sparse(of: dict[int, float]) -> SparseVector:
    ids = sorted(of)
    return SparseVector(np.array(ids, np.int64), np.array([of[each] for each in ids], np.float32))


def distance(one: KindCanaries, other: KindCanaries) -> float:
    return float(one.distances(other).max())


@given(numbers, numbers)
def test_the_distance_is_symmetric_and_that_of_equal_vectors_is_none(first, second) -> None:
    one, other = KindCanaries(first), KindCanaries(second)
    assert distance(one, other) == distance(other, one) <= 2 + 1e-6
    assert distance(one, one) == 0


@given(st.floats(0, 3.14))
def test_of_vectors_of_one_length_it_is_what_is_missing_of_the_cosine(angle: float) -> None:
    first = KindCanaries(np.float32([[1, 0]]))
    second = KindCanaries(np.float32([[np.cos(angle), np.sin(angle)]]))
    assert distance(first, second) == pytest.approx(1 - np.cos(angle), abs=1e-5)


@given(st.lists(weights, min_size=1, max_size=4), st.data())
def test_sparse_vectors_are_compared_by_their_tokens(before, data) -> None:
    after = [{**each} for each in before]
    changed = data.draw(st.integers(0, len(after) - 1))
    after[changed][10] = 1.0
    first, second = (KindCanaries.of_sparse([*map(sparse, each)]) for each in (before, after))
    squares = sum(weight**2 for weight in before[changed].values())
    assert distance(first, second) == pytest.approx(1 / (2 * squares + 1), rel=1e-4)
    assert distance(first, KindCanaries.of_sparse([*map(sparse, before)])) == 0


def test_another_number_of_dimensions_is_as_far_as_can_be() -> None:
    assert distance(KindCanaries(ROWS), KindCanaries(ROWS[:, :2])) == 2


def test_each_kind_that_was_made_has_canaries() -> None:
    made = [TextEmbedding(dense=row, colbert=np.stack([row, row])) for row in ROWS]
    found = canaries_of(made)
    assert found.keys() == {"dense", "colbert"}
    assert np.array_equal(found["colbert"].rows, ROWS)
    found = canaries_of([TextEmbedding(sparse=sparse({3: 0.5}))])
    assert (found["sparse"].rows.tolist(), found["sparse"].columns.tolist()) == ([[0.5]], [3])


@pytest.mark.parametrize(
    ("before", "after", "by", "warns"),
    [
        ("float32/native", "float32/torch", 1e-3, False),
        ("float32/native", "float32/native", 1e-2, True),
        ("float32/native", "bfloat16/native", 5e-2, False),
        ("bfloat16/native", "float32/native", 5e-2, False),
        ("bfloat16/native", "bfloat16/native", 0.1, True),
        ("int8/native", "bfloat16/native", 0.1, False),
        ("int8/native", "int8/native", 0.5, True),
    ],
)
def test_more_than_rounding_explains_is_said(tmp_path: Path, before, after, by, warns) -> None:
    moved = ROWS.copy()
    moved[3, 4] = by
    assert drift(tmp_path, "m", SPACE, before, KindCanaries(ROWS)) == 0
    with capture_logs() as logs:
        found = drift(tmp_path, "m", SPACE, after, KindCanaries(moved))
    assert found == pytest.approx(by**2 / (2 + by**2), rel=1e-4)
    assert [each["event"] for each in logs] == ["vector_space_drifted"] * warns
    if warns:
        assert (logs[0]["precision_before"], logs[0]["kind"]) == (before, "dense")
    # What is kept is that of the first start.
    assert drift(tmp_path, "m", SPACE, before, KindCanaries(ROWS)) == 0


def test_spaces_are_not_compared_with_each_other(tmp_path: Path) -> None:
    other = VectorSpace("dense", *8 * ["b"])
    drift(tmp_path, "m", SPACE, "float32", KindCanaries(ROWS))
    assert drift(tmp_path, "m", other, "float32", KindCanaries(-ROWS)) == 0
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut"])
def test_a_damaged_record_is_said_and_made_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{SPACE}.npz").write_bytes(content)
    with capture_logs() as logs:
        assert drift(tmp_path, "m", SPACE, "float32", KindCanaries(ROWS)) == 0
    assert [each["event"] for each in logs] == ["canaries_not_read"]
    assert drift(tmp_path, "m", SPACE, "float32", KindCanaries(-ROWS)) == 2


def test_a_folder_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with capture_logs() as logs:
        assert drift(tmp_path / "file", "m", SPACE, "float32", KindCanaries(ROWS)) == 0
    assert logs[-1]["event"] == "canaries_not_kept"
    assert logs[-1]["setting"] == "STATE_DIR"
