"""What was found, for people and for programs."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from smart_embedder_client.qdrant.store import SOURCE
from smart_embedder_client.search.explain import Explanation
from smart_embedder_client.search.stages import STAGES, Found
from smart_embedder_client.terminal import plain, plain_json

_NAMES = {"dense": "dense", "sparse": "sparse", "fused": "RRF", "colbert": "ColBERT"}
_LONGEST_TEXT = 300


def as_json(query: str, found: Sequence[Found], explained: Sequence[Explanation] | None) -> str:
    """One JSON object: the query, and its hits with the score and the rank of each stage."""
    hits = []
    for i, each in enumerate(found):
        hit: dict[str, Any] = {
            "id": each.id,
            **each.payload,
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
        text = textwrap.shorten(each.text, _LONGEST_TEXT, placeholder=" ...")
        yield f"{place:2}. {plain(text)}"
        yield f"    {plain(str(each.payload.get(SOURCE, each.id)))}: {_scores(each)}"
        if explained is not None:
            yield from _explanation(explained[place - 1])


def _scores(found: Found) -> str:
    """Each stage with its score and, after `#`, its rank."""
    return ", ".join(
        f"{_NAMES.get(name, name)} {found.scores[name].score:.4f} #{found.scores[name].rank}"
        for name in STAGES
        if name in found.scores
    )


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
