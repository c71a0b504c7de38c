"""`smart-embedder search`: scores of all stages, explanations and output."""

import asyncio
import json
import re
from pathlib import Path

import numpy as np
import pytest
from smart_embedder_client import Client, Tokenized, cli
from smart_embedder_client.ingest.options import IngestOptions
from smart_embedder_client.ingest.run import ingest
from smart_embedder_client.matches import best_part
from smart_embedder_client.qdrant.store import KINDS, Target
from smart_embedder_client.search import (
    Passage,
    Score,
    as_json,
    as_text,
    main,
)

from tests.support.checkpoints import plain_corpus
from tests.support.qdrant.process import QdrantServer
from tests.support.server import RunningServer

QUERY = "search a river in winter"
TEXTS = plain_corpus(40, seed=5)


@pytest.fixture(scope="module", params=["edge", "http", "grpc"])
def collection(request, server: RunningServer, qdrant: QdrantServer, tmp_path_factory) -> list[str]:
    """Options for a collection of TEXTS; where no gRPC answers, HTTP is used."""
    folder = tmp_path_factory.mktemp("search")
    source = folder / "texts.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    options = IngestOptions(source=source, dataset="texts")
    address = f"edge:{folder}" if request.param == "edge" else qdrant.url
    port = qdrant.grpc_port if request.param == "grpc" else 1
    target = Target(address, f"texts-{request.param}", grpc_port=port)
    report = asyncio.run(ingest(options, target, server.url, journal=folder / "journal"))
    assert report.points == len(TEXTS)
    where = ["--qdrant", address, "--collection", target.collection]
    return [*where, "--grpc-port", str(port)]


@pytest.fixture
def search(collection: list[str], server: RunningServer, capsys: pytest.CaptureFixture[str]):
    """Run the command, and return its output."""

    def run(*options: str, status: int = 0) -> str:
        assert main([QUERY, "--url", server.url, *collection, *options]) == status
        out, err = capsys.readouterr()
        return out if status == 0 else err

    return run


@pytest.fixture(scope="module")
def vectors(server: RunningServer):
    """The vectors of the query and of each text."""
    with Client(server.url) as client:
        return client.embed([QUERY, *TEXTS], return_colbert=True)


def test_scores_of_each_stage_equal_those_of_the_vectors(search, vectors) -> None:
    hits = json.loads(search("--json", "--limit", "8"))["hits"]
    assert len(hits) == 8
    colbert = {
        text: float((vectors.colbert[0] @ vectors.colbert[i].T).max(axis=1).sum())
        for i, text in enumerate(TEXTS, 1)
    }
    dense = {text: float(vectors.dense[0] @ vectors.dense[i]) for i, text in enumerate(TEXTS, 1)}
    for place, hit in enumerate(hits, 1):
        assert hit["scores"]["colbert"] == pytest.approx(colbert[hit["text"]], abs=1e-3)
        assert hit["scores"]["dense"] == pytest.approx(dense[hit["text"]], abs=1e-4)
        assert hit["ranks"]["colbert"] == place
        assert hit["source"] == "texts.jsonl"
        weights, ranks = {"dense": 3, "sparse": 1}, hit["ranks"]
        fused = sum(weight / ranks[kind] for kind, weight in weights.items() if kind in ranks)
        assert hit["scores"]["fused"] == pytest.approx(fused, abs=1e-4)


def test_rescore_none_and_rerank(search, server: RunningServer) -> None:
    hits = json.loads(search("--json", "--rescore", "none"))["hits"]
    assert [hit["ranks"]["fused"] for hit in hits] == list(range(1, 11))
    assert all("colbert" not in hit["scores"] for hit in hits)
    hits = json.loads(search("--json", "--rescore", "rerank", "--fused", "12"))["hits"]
    with Client(server.url) as client:
        ranking = client.rerank(QUERY, [hit["text"] for hit in hits])
    assert [hit["text"] for hit in hits] == ranking.passages
    np.testing.assert_allclose([hit["scores"]["rerank"] for hit in hits], ranking.scores, atol=1e-4)


@pytest.fixture(scope="module")
def pages(server: RunningServer, tmp_path_factory) -> list[str]:
    """Options for collections of two pages with the same section, with and without ColBERT."""
    folder = tmp_path_factory.mktemp("pages")
    filler = [f"{text}." for text in plain_corpus(16, seed=3)]
    lines = [*filler[:8], f"{QUERY}.", *filler[8:]]
    body = f"<h1>Rivers</h1><h2 id='far'>Far</h2><p>{' '.join(lines)}"
    (folder / "texts").mkdir()
    for name in ("a.html", "b.html"):
        (folder / "texts" / name).write_text(body)
    for name, kinds in (("all", KINDS), ("dense-sparse", KINDS[:2])):
        options = IngestOptions(
            source=folder / "texts", dataset="pages", chunk_tokens=500, kinds=frozenset(kinds)
        )
        target = Target(f"edge:{folder / 'edge'}", name)
        asyncio.run(ingest(options, target, server.url, journal=folder / name))
    return ["--url", server.url, "--qdrant", f"edge:{folder / 'edge'}"]


def match_by_colbert(url: str, text: str) -> str:
    with Client(url) as client:
        query = client.embed_query(QUERY, return_colbert=True).colbert[0]
        vectors = client.embed_documents([text], return_colbert=True).colbert[0]
        (tokens,) = client.tokenize([text])
    return best_part(text, tokens, query @ vectors[:-1].T)


@pytest.mark.parametrize(
    "options",
    [
        ["--collection", "all"],
        ["--collection", "all", "--rescore", "none"],
        ["--collection", "dense-sparse", "--rescore", "none"],
    ],
    ids=["colbert", "not ordered by it", "no colbert"],
)
def test_hit_shows_match_headings_anchor_and_equal_texts_once(
    pages: list[str], capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main([QUERY, *pages, *options, "--json"]) == 0
    (hit,) = json.loads(capsys.readouterr().out)["hits"]
    if "all" in options:
        assert hit["match"] == match_by_colbert(pages[1], hit["text"]) != hit["text"][:300]
    else:
        assert QUERY in hit["match"]
    assert hit["match"] in hit["text"]
    assert len(hit["match"]) <= 300 < len(hit["text"])
    assert main([QUERY, *pages, *options]) == 0
    shown, headings, location, also = capsys.readouterr().out.splitlines()
    before = "" if hit["text"].startswith(hit["match"]) else "... "
    assert shown == f" 1. {before}{' '.join(hit['match'].split())} ..."
    assert headings == "    Rivers > Far"
    # Both have the same scores, so either may come first.
    places = {location.partition("#far: dense ")[0], also.removeprefix("    the same text: ")}
    assert places in ({"    a.html", "b.html#far"}, {"    b.html", "a.html#far"})
    assert hit["location"] == f"{hit['source']}#far"
    assert {hit["location"], *hit["also"]} == {"a.html#far", "b.html#far"}


def test_best_part_has_the_most_similar_tokens() -> None:
    """No other window that begins at a word has a greater sum."""
    generator = np.random.default_rng(7)
    text = " ".join(f"word{i}" + "." * (i % 9 == 0) for i in range(200))
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    spans = np.array([(start, start + len(text[start:].split(" ")[0])) for start in starts])
    similarity = np.zeros((3, 200), np.float32)
    similarity[0, 20] = similarity[1, 125] = similarity[2, 130] = 1.0
    similarity += generator.random(similarity.shape, np.float32) / 100
    part = best_part(text, Tokenized(np.arange(200), spans), similarity)
    assert {"word125", "word130"} <= {word.strip(".") for word in part.split()}
    assert len(part) <= 300
    assert best_part(text, Tokenized(np.arange(200), spans), similarity * 0) == text[:300]
    # Also without spaces and sentences.
    spans = np.array([(i, i + 1) for i in range(1_000)])
    similarity = np.zeros((1, 1_000), np.float32)
    similarity[0, 700] = 1.0
    part = best_part("a" * 700 + "b" + "a" * 299, Tokenized(np.arange(1_000), spans), similarity)
    assert "b" in part


def test_rows_with_fields_named_like_anchors_are_shown() -> None:
    metadata = {"headings": "a", "anchor": 3}
    found = Passage("1", {"text": "a text", "source": "a.jsonl", "metadata": metadata})
    assert (found.location, found.headings) == ("a.jsonl", [])


def test_control_characters_do_not_reach_the_terminal() -> None:
    """C0, C1 and direction marks are removed; JSON escapes them, including C1."""
    evil = "a\x1b[2J\u009b31m\x07\r\n\u202eb\x7f"
    score = {"fused": Score(1.0, 1)}
    found = [Passage("1", {"text": evil, "source": evil}, score)]
    lines = list(as_text(found))
    assert len(lines) == 2
    assert all(line.isprintable() and "a" in line for line in lines)
    printed = as_json(evil, found)
    assert printed.isprintable()
    assert json.loads(printed)["hits"][0]["text"] == evil


def test_query_in_another_vector_space_is_refused(
    collection: list[str], other_server, capsys
) -> None:
    where = [QUERY, *collection]
    for options in ([], ["--rescore", "none"]):
        assert main([*where, "--url", other_server.url, *options]) == 1
        out, message = capsys.readouterr()
        assert message.startswith("the service's vectors are of another space than those of ")
        assert f"smart-embedder ingest --from-collection {collection[3]} --coll" in message
        assert (" here, wanted " in message, message.count("\n"), out) == (True, 1, "")


def test_collection_of_unknown_vector_space_is_searched_with_a_note(
    pages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(pages[-1].removeprefix("edge:"), "all", "smart_embedder.json").unlink()
    assert main([QUERY, *pages, "--collection", "all"]) == 0
    message = "the collection all does not say in which space its vectors are\n"
    assert capsys.readouterr().err == message


def test_missing_collection_is_reported(server: RunningServer, tmp_path: Path, capsys) -> None:
    where = ["--url", server.url, "--qdrant", f"edge:{tmp_path}", "--collection", "none"]
    assert main([QUERY, *where]) == 1
    assert capsys.readouterr().err == "there is no such collection with dense or sparse vectors\n"
    where[3] = str(tmp_path)
    assert main([QUERY, *where]) == 1
    message = f"{tmp_path} is neither http://host:6333 nor edge:FOLDER\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("command", ["ingest", "search", "check"])
def test_help_names_every_option(command: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["smart-embedder", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert f"smart-embedder {command}" in printed
    assert "--qdrant ADDRESS" in printed
