"""`smart-embedder search`: hybrid search in a Qdrant collection, with the scores of each stage.

Dense and sparse vectors, their fusion, then ColBERT or reranking; and the words behind them.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from smart_embedder_client import arguments as common
from smart_embedder_client.answers import Embeddings
from smart_embedder_client.arguments import plain, plain_json
from smart_embedder_client.client import Client
from smart_embedder_client.errors import VECTOR_SPACE_UNKNOWN, SmartEmbedderError
from smart_embedder_client.matches import Question
from smart_embedder_client.options import EmbedOptions
from smart_embedder_client.qdrant.store import (
    ANCHOR,
    ANCHORS,
    COLBERT,
    DENSE,
    HEADINGS,
    METADATA,
    SOURCE,
    SPARSE,
    TEXT,
    Datatype,
    Depths,
    Hit,
    QdrantError,
    Store,
    Vectors,
    check_model,
    open_store,
    same_space,
)
from smart_embedder_client.safetensors import Array

Rescore = Literal["colbert", "rerank", "none"]

FUSED, RERANK = "fused", "rerank"
STAGES = (DENSE, SPARSE, FUSED, COLBERT, RERANK)
_NAMES = {"dense": "dense", "sparse": "sparse", "fused": "RRF", "colbert": "ColBERT"}
_ABOUT = """\
Search a collection that `smart-embedder ingest` has made.

Dense and sparse vectors find candidates, reciprocal rank fusion joins them, and ColBERT vectors or
the service's reranker order the best. Each score is followed by the rank in its stage.
"""


@dataclass(frozen=True, slots=True)
class Score:
    """What one stage says of a passage; `rank` begins with 1."""

    score: float
    rank: int


@dataclass(frozen=True, slots=True)
class Found:
    """One passage, with the score of every stage that it has reached.

    Attributes:
        match: The part of its text that matches the question best.
        also: Where the same text was found once more.
    """

    id: str
    payload: Mapping[str, Any]
    scores: Mapping[str, Score] = field(default_factory=dict)
    match: str = ""
    also: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The passage."""
        return str(self.payload.get(TEXT, ""))

    @property
    def location(self) -> str:
        """Its source, with the last anchor before the match."""
        location = source = str(self.payload.get(SOURCE, self.id))
        begin, within = self.text.find(self.match), self._metadata(ANCHORS)
        # Rows may have fields of these names that are something else.
        for anchor in ([0, self._metadata(ANCHOR)], *(within if isinstance(within, list) else ())):
            match anchor:
                case [int(place), str(name)] if place <= max(begin, 0):
                    location = f"{source}#{name}"
        return location

    @property
    def headings(self) -> list[str]:
        """The titles of the sections that it stands in, the outermost first."""
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
) -> list[Found]:
    """The best passages by the last stage, which `rescore` chooses.

    Raises `QdrantError` if there is no collection or its vectors are of another model or in another
    space, and `SmartEmbedderError`. `note` is told if the spaces cannot be compared.
    """
    layout = store.layout()
    if layout is None or not layout.kinds & {DENSE, SPARSE}:
        raise QdrantError("there is no such collection with dense or sparse vectors")
    kinds = layout.kinds & {DENSE, SPARSE, COLBERT}
    with same_space(store.collection):
        question = _embed(client, store, query, kinds, layout.datatype, note=note)
    vectors = question.vectors
    searched = vectors if rescore == "colbert" else replace(vectors, colbert=None)
    # More than are shown, because equal texts are left out afterwards.
    stages = store.search(searched, replace(depths, limit=depths.fused))
    last = stages.get(COLBERT, stages[FUSED])
    if rescore == "rerank" and last:
        ranking = client.rerank(query, [str(hit.payload.get(TEXT, "")) for hit in last])
        order = zip(ranking.indices.tolist(), ranking.scores.tolist(), strict=True)
        last = [Hit(last[i].id, score, last[i].payload) for i, score in order]
        stages[RERANK] = last
    ranks = {
        name: {hit.id: Score(hit.score, rank) for rank, hit in enumerate(hits, 1)}
        for name, hits in stages.items()
    }
    found: dict[str, Found] = {}
    for hit in last:
        scores = {name: of[hit.id] for name, of in ranks.items() if hit.id in of}
        passage = Found(hit.id, hit.payload, scores)
        if (first := found.get(passage.text)) is not None:
            found[passage.text] = replace(first, also=[*first.also, passage.location])
        elif len(found) < depths.limit:
            found[passage.text] = passage
    matches = question.matches(client, store, {passage.id: text for text, passage in found.items()})
    return [replace(passage, match=matches[passage.id]) for passage in found.values()]


def _embed(
    client: Client,
    store: Store,
    query: str,
    kinds: frozenset[str],
    datatype: Datatype | None,
    *,
    note: Callable[[str], None],
) -> Question:
    """The question in vectors of these kinds, in the space and the type of the collection's.

    Raises the service's refusal, and `QdrantError` where only the names of models can be compared.
    """
    origin = store.origin()
    options: EmbedOptions = {
        "return_dense": DENSE in kinds,
        "return_sparse": SPARSE in kinds,
        "return_colbert": COLBERT in kinds,
        "output_dtype": datatype or "float32",
        "if_vector_space": [] if origin is None else origin.ids_of(kinds),
    }
    try:
        answer = client.embed_query(query, **options)
    except SmartEmbedderError as error:
        if error.code != VECTOR_SPACE_UNKNOWN:
            raise
        answer = client.embed_query(query, **options | {"if_vector_space": []})
    if origin is None or not answer.vector_space:
        who = "the collection" if origin is None else "the service"
        note(f"{who} does not say in which space its vectors are, so names of models are compared")
        check_model(store, answer.dense_model_name)
    vectors = Vectors(
        None if answer.dense is None else answer.dense[0],
        None if answer.sparse is None else answer.sparse[0],
        None if answer.colbert is None else answer.colbert[0],
    )
    return Question(vectors, answer.colbert_model_name or answer.sparse_model_name)


@dataclass(frozen=True, slots=True)
class SharedTerm:
    """A token that both have; its weights multiplied are its part of the sparse score."""

    token: str
    query_weight: float
    passage_weight: float


@dataclass(frozen=True, slots=True)
class BestMatch:
    """The token of the passage whose ColBERT vector is most similar to that of a query token."""

    query_token: str
    passage_token: str
    similarity: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """`terms` by falling product; `matches` in the order of the question."""

    terms: list[SharedTerm]
    matches: list[BestMatch]


def explain(client: Client, query: str, passages: Sequence[str]) -> list[Explanation]:
    """The matching tokens of each passage, of vectors that are computed anew."""
    if not passages:
        return []
    answer = client.embed(
        [query, *passages], return_dense=False, return_colbert=True, return_tokens=True
    )
    return [
        Explanation(_shared_terms(answer, i), _best_matches(answer, i))
        for i in range(1, 1 + len(passages))
    ]


def _shared_terms(answer: Embeddings, passage: int) -> list[SharedTerm]:
    if answer.sparse is None or answer.tokens is None:
        return []
    weights = answer.sparse[passage].as_dict()
    query = answer.sparse[0]
    terms = [
        SharedTerm(token, weight, weights[index])
        for token, index, weight in zip(
            answer.tokens[0].sparse or (),
            query.indices.tolist(),
            query.values.tolist(),
            strict=True,
        )
        if index in weights
    ]
    return sorted(terms, key=lambda term: -term.query_weight * term.passage_weight)


def _best_matches(answer: Embeddings, passage: int) -> list[BestMatch]:
    if answer.colbert is None or answer.tokens is None:
        return []
    similarity: Array = answer.colbert[0] @ answer.colbert[passage].T
    best = np.argmax(similarity, axis=1)
    query_tokens = answer.tokens[0].colbert or []
    passage_tokens = answer.tokens[passage].colbert or []
    return [
        BestMatch(token, passage_tokens[place], float(similarity[i, place]))
        for i, (token, place) in enumerate(zip(query_tokens, best.tolist(), strict=True))
    ]


def as_json(query: str, found: Sequence[Found], explained: Sequence[Explanation] | None) -> str:
    """One JSON object: the query, and its hits with the score and the rank of each stage."""
    hits = []
    for i, each in enumerate(found):
        hit: dict[str, Any] = {
            "id": each.id,
            **each.payload,
            "location": each.location,
            "match": each.match,
            "also": each.also,
            "scores": {name: score.score for name, score in each.scores.items()},
            "ranks": {name: score.rank for name, score in each.scores.items()},
        }
        if explained is not None:
            hit["explanation"] = asdict(explained[i])
        hits.append(hit)
    return plain_json({"query": query, "hits": hits})


def as_text(found: Sequence[Found], explained: Sequence[Explanation] | None) -> Iterator[str]:
    """Lines for a terminal."""
    if not found:
        yield "Nothing was found."
    for place, each in enumerate(found, 1):
        match = each.match or each.text
        start = each.text.find(match)
        before, after = each.text[:start].strip(), each.text[start + len(match) :].strip()
        shown = f"{'... ' if before else ''}{' '.join(match.split())}{' ...' if after else ''}"
        yield f"{place:2}. {plain(shown)}"
        if each.headings:
            yield f"    {plain(' > '.join(each.headings))}"
        # Each stage with its score and, after `#`, its rank.
        stages = [(name, each.scores[name]) for name in STAGES if name in each.scores]
        told = [f"{_NAMES.get(name, name)} {of.score:.4f} #{of.rank}" for name, of in stages]
        yield f"    {plain(each.location)}: {', '.join(told)}"
        if each.also:
            yield f"    the same text: {plain(', '.join(each.also))}"
        if explained is not None:
            yield from _explanation(explained[place - 1])


def _explanation(explanation: Explanation) -> Iterator[str]:
    terms = ", ".join(
        f"{_word(term.token)} {term.query_weight:.3f} x {term.passage_weight:.3f}"
        for term in explanation.terms
    )
    yield f"    terms: {terms or 'none in common'}"
    matches = ", ".join(
        f"{_word(each.query_token)} > {_word(each.passage_token)} {each.similarity:.2f}"
        for each in explanation.matches
    )
    yield f"    ColBERT: {matches}"


def _word(token: str) -> str:
    """A token without SentencePiece's mark for the space before it."""
    return plain(token.replace("\N{LOWER ONE EIGHTH BLOCK}", "")) or "(space)"


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit status is 0 if the question was answered."""
    parsed = _parser().parse_args(arguments)
    warnings.filterwarnings("ignore", category=UserWarning, module="smart_embedder_client")
    try:
        _search(parsed)
    except (QdrantError, SmartEmbedderError) as error:
        sys.stderr.write(f"{plain(str(error))}\n")
        return 1
    return 0


def _note(sentence: str) -> None:
    sys.stderr.write(f"{plain(sentence)}\n")


def _search(parsed: argparse.Namespace) -> None:
    depths = Depths(parsed.candidates, max(parsed.fused, parsed.limit), parsed.limit)
    with (
        Client(parsed.url, token=parsed.token) as client,
        closing(open_store(common.read_target(parsed))) as store,
    ):
        found = find(client, store, parsed.query, depths, parsed.rescore, note=_note)
        texts = [each.text for each in found]
        explained = explain(client, parsed.query, texts) if parsed.explain else None
    if parsed.json:
        sys.stdout.write(f"{as_json(parsed.query, found, explained)}\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in as_text(found, explained))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smart-embedder search",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("query", metavar="QUERY", help="a question, or some words")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--explain", action="store_true", help="show which tokens of each passage match"
    )
    common.add_common(parser)
    add = parser.add_argument_group("stages").add_argument
    number: dict[str, Any] = {"type": common.positive, "metavar": "N"}
    help_ = "passages found by dense and by sparse vectors each (%(default)s)"
    add("--candidates", **number, default=100, help=help_)
    add("--fused", **number, default=20, help="passages that the last stage orders (%(default)s)")
    add("--limit", **number, default=10, help="passages that are printed (%(default)s)")
    help_ = "the last stage: ColBERT in Qdrant, the service's /rerank, or none (%(default)s)"
    add("--rescore", choices=get_args(Rescore), default="colbert", help=help_)
    return parser
