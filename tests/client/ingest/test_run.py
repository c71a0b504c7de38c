"""Whole runs: the collection after the first run, the second, and after changes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.ingest.sources import Fields
from smart_embedder_client.qdrant import store as qdrant_store
from smart_embedder_client.qdrant.store import Origin, make_layout

from tests.client.ingest.conftest import Runs


def test_later_runs_store_missing_points_and_remove_only_with_sync(
    runs: Runs, folder: Path
) -> None:
    first, ids = runs.run(), runs.ids()
    assert first.uploaded == first.points == len(set(ids)) == len(ids) > 3
    assert (first.documents, first.refused, first.stale) == (3, [], 0)
    second = runs.run()
    assert (second.uploaded, second.points) == (0, first.points)
    runs.journal.unlink()
    third = runs.run()
    assert (third.uploaded, third.points) == (0, first.points)
    runs.query_store(lambda store: store.delete(ids[1:3]))
    assert runs.run().uploaded == 2
    assert sorted(runs.ids()) == sorted(ids)

    (folder / "lid.txt").unlink()
    (folder / "pump.txt").write_text("The pump runs in winter.")
    changed = runs.run()
    assert (changed.uploaded, changed.stale, changed.removed) == (1, 2, 0)
    synced = runs.run(sync=True)
    assert (synced.uploaded, synced.removed, synced.stale) == (0, 2, 0)
    assert len({*ids} & {*runs.ids()}) == len(ids) - 2
    (folder / "lid.txt").write_text("The lid of the train is open.")
    assert runs.run().uploaded == 1
    assert len(runs.ids()) == len(ids)

    layout = runs.query_store(lambda store: store.layout())
    assert layout.kinds == {"dense", "sparse", "colbert"}
    assert layout.sparse == {"sparse": None}
    assert layout.vectors["colbert"].is_multivector
    assert {config.distance for config in layout.vectors.values()} == {"Cosine"}


def test_unchanged_chunks_of_a_changed_document_keep_their_ids(
    edge_runs: Runs, folder: Path, tiny_m3: Path
) -> None:
    points = edge_runs.run().points
    again = edge_runs.run(tokenizer=tiny_m3 / "tokenizer.json", recheck=True)
    assert (again.uploaded, again.points) == (0, points)
    before = set(edge_runs.ids())
    with (folder / "long.md").open("a") as file:
        file.write("\n\nA last paragraph, about the kitchen.")
    changed = edge_runs.run(sync=True)
    assert 0 < changed.uploaded <= 2
    assert changed.removed <= 1
    assert len(before & set(edge_runs.ids())) >= len(before) - 1


def test_repeated_rows_are_stored_once_unless_their_ids_differ(
    edge_runs: Runs, tmp_path: Path
) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"text": "the river", "id": 1, "year": 2020}, {"text": "the river", "id": 2}]
    source.write_text("\n".join(map(json.dumps, [*rows, rows[0]])))
    report = edge_runs.run(source=source, fields=Fields(id="id"))
    assert (report.documents, report.repeated, report.points) == (3, 1, 2)
    ids = edge_runs.ids()
    payload = edge_runs.query_store(lambda store: store.read(ids, with_vectors=False)[0].payload)
    assert payload["text"] == "the river"
    assert (payload["source"], payload["dataset"]) == ("rows.jsonl", "texts")
    assert payload["metadata"]["id"] in {1, 2}


def test_sync_keeps_the_points_of_other_datasets(edge_runs: Runs, tmp_path: Path) -> None:
    points = edge_runs.run().points
    source = tmp_path / "other.txt"
    source.write_text("winter garden")
    other = replace(edge_runs, journal=tmp_path / "other.sqlite")
    assert other.run(source=source, dataset="other", sync=True).removed == 0
    assert len(edge_runs.ids()) == points
    with pytest.raises(IngestError, match="was ingested from .* before"):
        edge_runs.run(source=source, sync=True)
    assert len(edge_runs.ids()) == points


def test_collection_with_other_vectors_is_refused_in_one_sentence(edge_runs: Runs) -> None:
    layout = make_layout(7, None, sparse=True, datatype="float32")
    edge_runs.query_store(lambda store: store.create(layout, Origin({}, [])))
    with pytest.raises(IngestError) as caught:
        edge_runs.run()
    message = str(caught.value)
    assert "its vector dense is 7 numbers (Cosine, float32), and 64 numbers" in message
    assert "it has no vector colbert" in message
    assert "\n" not in message


def test_datatype_of_stored_vectors(edge_runs: Runs) -> None:
    datatype = "uint8"
    assert edge_runs.run(datatype=datatype).refused == []
    layout = edge_runs.query_store(lambda store: store.layout())
    assert {config.datatype for config in layout.vectors.values()} == {datatype}
    # The next run uses the datatype of the collection.
    assert edge_runs.run().uploaded == 0
    with pytest.raises(IngestError, match=f"its vector dense is .*{datatype}.* is needed"):
        edge_runs.run(datatype="float32")


def test_chunk_tokens_above_the_model_limit_are_refused(edge_runs: Runs) -> None:
    with pytest.raises(IngestError, match="longer than the .* that the service reads"):
        edge_runs.run(chunk_tokens=100_000)
    with pytest.raises(IngestError, match="an overlap of 64 tokens needs chunks of more than 66"):
        edge_runs.run(chunk_tokens=66, overlap=64)


def test_colbert_vectors_of_long_chunks_are_pooled(
    edge_runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 19 vectors here, in place of 1,023 with bge-m3."""
    monkeypatch.setattr(qdrant_store, "MULTIVECTOR_NUMBERS", 64 * 20)
    report = edge_runs.run()
    assert (report.pooled > 0, report.refused) == (True, [])


@pytest.mark.parametrize("runs", ["grpc", "edge"], indirect=True)
def test_collection_with_deeply_nested_metadata_is_opened_again(runs: Runs, tmp_path: Path) -> None:
    """With more levels, Qdrant Edge could not read its log."""
    source = tmp_path / "rows.jsonl"
    levels = [level[:-1] * 19 + "0" + level[-1] * 19 for level in ("[]", '{"a":}')]
    rows = [f'{{"text": "deep {i}", "levels": {value}}}' for i, value in enumerate(levels)]
    source.write_text("\n".join(rows))
    assert runs.run(source=source).uploaded == 2
    assert runs.run(source=source, recheck=True).uploaded == 0
