"""`smart-embedder search`: hybrid search in a Qdrant collection, with the scores of each stage.

The stages are dense and sparse vectors, their fusion, and ColBERT or reranking.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from smart_embedder_client import arguments as common
from smart_embedder_client.arguments import print_error, to_json_line, to_line
from smart_embedder_client.client import Client
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.matches import Question
from smart_embedder_client.qdrant import open_store
from smart_embedder_client.qdrant.store import (
    ANCHOR,
    COLBERT,
    DENSE,
    HEADINGS,
    METADATA,
    SOURCE,
    SPARSE,
    TEXT,
    Depths,
    Hit,
    QdrantError,
    Store,
    TextVectors,
    same_space,
    vector_options,
)

Rescore = Literal["colbert", "rerank", "none"]

FUSED, RERANK = "fused", "rerank"
STAGES = (DENSE, SPARSE, FUSED, COLBERT, RERANK)
_NAMES = {"dense": "dense", "sparse": "sparse", "fused": "RRF", "colbert": "ColBERT"}
_ABOUT = """\
Search a collection that `smart-embedder ingest` has made.

Dense and sparse vectors find candidates, reciprocal rank fusion joins them, and ColBERT vectors or
the service's reranker sort the best. Each score is followed by the rank in its stage.
"""


@dataclass(frozen=True, slots=True)
class Score:
    """The score and the rank, from 1, of a passage in one stage."""

    score: float
    rank: int


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage that was found, with its score in each stage that it reached.

    Attributes:
        match: The part of its text that matches the question best.
        also: The locations of other passages with the same text.
    """

    id: str
    payload: Mapping[str, Any]
    scores: Mapping[str, Score] = field(default_factory=dict)
    match: str = ""
    also: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The text of the passage."""
        return str(self.payload.get(TEXT, ""))

    @property
    def location(self) -> str:
        """Its source, with the anchor of its section or page."""
        source, anchor = str(self.payload.get(SOURCE, self.id)), self._metadata(ANCHOR)
        # A row may have a field with this name that is no anchor.
        return f"{source}#{anchor}" if isinstance(anchor, str) else source

    @property
    def headings(self) -> list[str]:
        """The headings above it, the outermost first."""
        headings = self._metadata(HEADINGS)
        return list(map(str, headings)) if isinstance(headings, list) else []

    def _metadata(self, name: str) -> Any:
        metadata = self.payload.get(METADATA)
        return metadata.get(name) if isinstance(metadata, Mapping) else None


def find(
    client: Client,
    store: Store,
    query: str,
    depths: Depths,
    rescore: Rescore,
    *,
    note: Callable[[str], None] = lambda _: None,
) -> list[Passage]:
    """Return the best passages by the last stage, which `rescore` selects.

    `note` is called with a sentence if the vector spaces cannot be compared. Raises `QdrantError`
    if there is no such collection or its vectors have another space, and `SmartEmbedderError`.
    """
    layout = store.layout()
    if layout is None or not layout.kinds & {DENSE, SPARSE}:
        raise QdrantError("there is no such collection with dense or sparse vectors")
    kinds = layout.kinds & {DENSE, SPARSE, COLBERT}
    with same_space(store.collection):
        if (origin := store.origin()) is None:
            note(f"the collection {store.collection} does not say in which space its vectors are")
        spaces = [] if origin is None else origin.ids_of(kinds)
        options = vector_options(kinds, layout.datatype or "float32", spaces)
        response = client.embed_query(query, **options)
    model = response.colbert_model_name or response.sparse_model_name
    question = Question(TextVectors.of_response(response, 0), model)
    vectors = question.vectors if rescore == "colbert" else replace(question.vectors, colbert=None)
    # More than `limit`, because equal texts are merged below.
    stages = store.search(vectors, replace(depths, limit=depths.fused))
    last = stages.get(COLBERT, stages[FUSED])
    if rescore == "rerank" and last:
        ranking = client.rerank(query, [str(hit.payload.get(TEXT, "")) for hit in last])
        ranked = zip(ranking.indices.tolist(), ranking.scores.tolist(), strict=True)
        last = [Hit(last[index].id, score, last[index].payload) for index, score in ranked]
        stages[RERANK] = last
    stage_scores = {
        stage: {hit.id: Score(hit.score, rank) for rank, hit in enumerate(hits, 1)}
        for stage, hits in stages.items()
    }
    passages: dict[str, Passage] = {}
    for hit in last:
        scores = {
            stage: scores[hit.id] for stage, scores in stage_scores.items() if hit.id in scores
        }
        passage = Passage(hit.id, hit.payload, scores)
        if (first := passages.get(passage.text)) is not None:
            passages[passage.text] = replace(first, also=[*first.also, passage.location])
        elif len(passages) < depths.limit:
            passages[passage.text] = passage
    texts = {passage.id: text for text, passage in passages.items()}
    matches = question.matches(client, store, texts)
    return [replace(passage, match=matches[passage.id]) for passage in passages.values()]


def as_json(query: str, passages: Sequence[Passage]) -> str:
    """Return a JSON object: the query, and the hits with their scores and ranks."""
    hits = [
        {
            "id": passage.id,
            **passage.payload,
            "location": passage.location,
            "match": passage.match,
            "also": passage.also,
            "scores": {stage: score.score for stage, score in passage.scores.items()},
            "ranks": {stage: score.rank for stage, score in passage.scores.items()},
        }
        for passage in passages
    ]
    return to_json_line({"query": query, "hits": hits})


def as_text(passages: Sequence[Passage]) -> Iterator[str]:
    """Yield lines for a terminal."""
    if not passages:
        yield "Nothing was found."
    for number, passage in enumerate(passages, 1):
        text, match = passage.text, passage.match or passage.text
        start = text.find(match)
        before = "... " if text[:start].strip() else ""
        after = " ..." if text[start + len(match) :].strip() else ""
        yield f"{number:2}. {to_line(before + ' '.join(match.split()) + after)}"
        if passage.headings:
            yield f"    {to_line(' > '.join(passage.headings))}"
        stages = [(stage, passage.scores[stage]) for stage in STAGES if stage in passage.scores]
        scores = [f"{_NAMES.get(stage, stage)} {of.score:.4f} #{of.rank}" for stage, of in stages]
        yield f"    {to_line(passage.location)}: {', '.join(scores)}"
        if passage.also:
            yield f"    the same text: {to_line(', '.join(passage.also))}"


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0 if the question was answered."""
    parsed = _parser().parse_args(arguments)
    try:
        _search(parsed)
    except (QdrantError, SmartEmbedderError) as error:
        print_error(str(error))
        return 1
    return 0


def _search(parsed: argparse.Namespace) -> None:
    depths = Depths(parsed.candidates, max(parsed.fused, parsed.limit), parsed.limit)
    with (
        Client(parsed.url, token=parsed.token) as client,
        closing(open_store(common.read_target(parsed))) as store,
    ):
        passages = find(client, store, parsed.query, depths, parsed.rescore, note=print_error)
    if parsed.json:
        sys.stdout.write(f"{as_json(parsed.query, passages)}\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in as_text(passages))


def _parser() -> argparse.ArgumentParser:
    parser = common.make_parser("search", _ABOUT)
    parser.add_argument("query", metavar="QUERY", help="a question, or some words")
    common.add_common(parser)
    add = parser.add_argument_group("stages").add_argument
    number: dict[str, Any] = {"type": common.positive, "metavar": "N"}
    help_ = "passages that dense and sparse vectors find, each (%(default)s)"
    add("--candidates", **number, default=100, help=help_)
    add("--fused", **number, default=20, help="passages that the last stage sorts (%(default)s)")
    add("--limit", **number, default=10, help="passages that are printed (%(default)s)")
    help_ = "the last stage: ColBERT in Qdrant, the service's /rerank, or none (%(default)s)"
    add("--rescore", choices=get_args(Rescore), default="colbert", help=help_)
    return parser
