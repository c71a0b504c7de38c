"""The journal of stored documents, which two processes cannot share."""

from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.ingest.journal import (
    Journal,
    Recipe,
    chunk_ids,
    document_digest,
)
from smart_embedder_client.ingest.pace import batches
from smart_embedder_client.ingest.sources import Document

RECIPE = Recipe("texts", ("model",), (512, 64))
DIGESTS = [bytes([i] * 16) for i in range(3)]


def test_journal_is_kept_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "state" / "journal.sqlite"
    ids = [[str(uuid4()) for _ in range(count)] for count in (2, 0, 1)]
    with Journal(path) as journal:
        assert journal.stored(DIGESTS) == set()
        for digest, points in zip(DIGESTS, ids, strict=True):
            journal.add(digest, points)
        assert journal.first_source("/texts") == "/texts"
    with Journal(path) as journal:
        assert journal.points == 3
        assert journal.stored(DIGESTS[:2]) == set(DIGESTS[:2])
        assert journal.seen_points == 2
        assert journal.unseen([*ids[0], *ids[2]]) == ids[2]
        journal.forget_unseen()
        assert journal.stored(DIGESTS) == set(DIGESTS[:2])
        assert journal.first_source("/other") == "/texts"
        journal.forget()
        assert journal.points == 0


def test_journal_marks_documents_and_many_points_as_seen(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal:
        assert journal.see_first([DIGESTS[i] for i in (0, 0, 1)]) == [True, False, True]
        assert journal.see_first(DIGESTS[:1]) == [False]
        assert journal.seen_points == 0
        # More ids than a statement of SQLite takes.
        ids = [str(uuid4()) for _ in range(2500)]
        journal.mark_seen(ids[:2000])
        assert set(journal.unseen(ids)) == set(ids[2000:])


def test_unusable_journal_is_reported_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        with pytest.raises(IngestError, match="another run has it open"):
            Journal(path)
        # The page limit of SQLite fails like a full disk.
        journal._connection.execute("PRAGMA max_page_count = 8")
        with pytest.raises(IngestError, match="cannot be used: database or disk is full"):
            journal.add(DIGESTS[0], [str(uuid4()) for _ in range(10_000)])
        assert journal.stored(DIGESTS) == set()
    path.write_text("no database at all, and long enough to be taken for one" * 20)
    with pytest.raises(IngestError, match="cannot be used: file is not a database"):
        Journal(path)


def document(**changes: object) -> Document:
    fields = {"source": "a", "key": "", "text": "t", "metadata": {}, "size": 1} | changes
    return Document(**fields)  # type: ignore[arg-type]


def test_digests_and_ids_change_with_every_option_and_field() -> None:
    recipes = [RECIPE, Recipe("b", ("model",), (512, 64)), Recipe("texts", ("other",), (512, 64))]
    changes = [{}, {"source": "b"}, {"key": "1"}, {"metadata": {"year": 1}}]
    documents = [document(**change) for change in changes]
    pairs = [(changed, RECIPE) for changed in documents] + [
        (document(), recipe) for recipe in recipes[1:]
    ]
    assert len({document_digest(*pair) for pair in pairs}) == len(pairs)
    assert len({chunk_ids(changed, ["t"], recipe)[0] for changed, recipe in pairs}) == len(pairs)
    # The chunk length changes only the digests of documents.
    shorter = Recipe("texts", ("model",), (256, 64))
    assert document_digest(document(), RECIPE) != document_digest(document(), shorter)
    assert chunk_ids(document(), ["t"], RECIPE) == chunk_ids(document(), ["t"], shorter)
    # Repeated chunks of a document have different ids.
    ids = chunk_ids(document(), ["a", "b", "a"], RECIPE)
    assert len(set(ids)) == 3
    assert ids[:2] == chunk_ids(document(text="other"), ["a", "b"], RECIPE)


@given(st.lists(st.integers(0, 50)), st.integers(1, 60), st.none() | st.integers(1, 5))
def test_batches_keep_order_and_limits(
    items: list[int], max_weight: int, max_items: int | None
) -> None:
    grouped = list(batches(items, lambda item: item, lambda: max_weight, max_items))
    assert [item for batch in grouped for item in batch] == items
    for batch in grouped:
        assert sum(batch) <= max_weight or len(batch) == 1
        assert 0 < len(batch) <= (max_items or len(batch))
