"""Find the part of a passage that matches a question, by the vectors in the collection."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from smart_embedder_client.answers import Tokenized
from smart_embedder_client.client import Client
from smart_embedder_client.qdrant.store import Store, TextVectors
from smart_embedder_client.safetensors import Array

_MAX_MATCH = 300
# A sentence or a line begins after these.
_ENDS = re.compile(r"[.!?:]\s+$|\n\s*$|[\u3002\uff01\uff1f]$")


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """The vectors of a question, and the model that makes its ColBERT or sparse vectors."""

    vectors: TextVectors
    model: str | None

    def matches(self, client: Client, store: Store, passages: Mapping[str, str]) -> dict[str, str]:
        """Return the part of each passage that matches best, by the id of its point.

        It is the part whose tokens are most similar to those of the question: by ColBERT, or by
        sparse weights if the collection does not have a ColBERT vector for each token.
        """
        long = {id_: text for id_, text in passages.items() if len(text) > _MAX_MATCH}
        if not long or self.model is None:
            return {id_: text[:_MAX_MATCH] for id_, text in passages.items()}
        matches = dict(passages)
        tokenized = client.tokenize(list(long.values()), model=self.model)
        for (id_, text), tokens in zip(long.items(), tokenized, strict=True):
            matches[id_] = best_part(text, tokens, self._similarity(store, id_, tokens))
        return matches

    def _similarity(self, store: Store, id_: str, tokens: Tokenized) -> Array:
        """Return the similarities of tokens, `[tokens of the question, tokens]`."""
        if self.vectors.colbert is not None:
            # One point is read at a time: its vectors may take megabytes.
            for point in store.read([id_], with_vectors=True):
                colbert = point.vectors.colbert
                # The last vector belongs to the end token. Pooled vectors are fewer.
                if colbert is not None and len(colbert) == len(tokens.ids) + 1:
                    similarity: Array = (
                        _normalize(self.vectors.colbert) @ _normalize(colbert[:-1]).T
                    )
                    return similarity
        if self.vectors.sparse is None:
            return np.zeros((1, len(tokens.ids)), np.float32)
        sparse = self.vectors.sparse
        return np.where(sparse.indices[:, None] == tokens.ids, sparse.values[:, None], 0)


def _normalize(vectors: Array) -> Array:
    rows = np.asarray(vectors, np.float32)
    unit: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)
    return unit


def best_part(text: str, tokens: Tokenized, similarity: Array) -> str:
    """Return the part of at most 300 characters with the greatest sum of MaxSim."""
    if not similarity.any():
        return text[:_MAX_MATCH]
    starts, stops = tokens.spans.T
    best, best_score = text[:_MAX_MATCH], -np.inf
    for begin in _find_beginnings(text, starts.tolist()):
        inside = (starts >= begin) & (stops <= begin + _MAX_MATCH)
        if not inside.any():
            continue
        score = similarity[:, inside].max(axis=1).sum()
        # Among parts with the same tokens, the last one begins nearest to them.
        if score >= best_score:
            best, best_score = text[begin : stops[inside].max()], score
    return best


def _find_beginnings(text: str, starts: list[int]) -> list[int]:
    """Return where sentences and lines begin; in long ones also where words begin."""
    beginnings = [0]
    for start in starts:
        before = text[beginnings[-1] : start]
        is_far = 2 * len(before) > _MAX_MATCH and before[-1:].isspace()
        if is_far or len(before) > _MAX_MATCH or _ENDS.search(before):
            beginnings.append(start)
    return beginnings
