"""Which part of a passage matches a question, by the vectors that the collection has of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from smart_embedder_client.answers import Tokenized
from smart_embedder_client.client import Client
from smart_embedder_client.qdrant.store import Store, Vectors
from smart_embedder_client.safetensors import Array

_LONGEST_MATCH = 300
# Behind these a sentence or a line begins.
_ENDS = re.compile(r"[.!?:]\s+$|\n\s*$|[\u3002\uff01\uff1f]$")


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A question as vectors, and the model whose tokens its ColBERT or sparse vectors are of."""

    vectors: Vectors
    model: str | None

    def matches(self, client: Client, store: Store, passages: Mapping[str, str]) -> dict[str, str]:
        """Of each passage, by the id of its point, the part that matches best.

        That is the part whose tokens are most similar to those of the question, by ColBERT; where
        the collection has no ColBERT vector for each token, by their sparse weights.
        """
        long = {id_: text for id_, text in passages.items() if len(text) > _LONGEST_MATCH}
        if not long or self.model is None:
            return {id_: text[:_LONGEST_MATCH] for id_, text in passages.items()}
        matches = dict(passages)
        tokenized = client.tokenize(list(long.values()), model=self.model)
        for (id_, text), tokens in zip(long.items(), tokenized, strict=True):
            matches[id_] = best_part(text, tokens, self._similarity(store, id_, tokens))
        return matches

    def _similarity(self, store: Store, id_: str, tokens: Tokenized) -> Array:
        """`[tokens of the question, tokens]`."""
        if self.vectors.colbert is not None:
            # One at a time, since they may be long.
            for point in store.read([id_], with_vectors=True):
                colbert = point.vectors.colbert
                # The last vector is that of the end. There are fewer if they are pooled.
                if colbert is not None and len(colbert) == len(tokens.ids) + 1:
                    similarity: Array = _unit(self.vectors.colbert) @ _unit(colbert[:-1]).T
                    return similarity
        if self.vectors.sparse is None:
            return np.zeros((1, len(tokens.ids)), np.float32)
        sparse = self.vectors.sparse
        return np.where(sparse.indices[:, None] == tokens.ids, sparse.values[:, None], 0)


def _unit(vectors: Array) -> Array:
    rows = np.asarray(vectors, np.float32)
    unit: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)
    return unit


def best_part(text: str, tokens: Tokenized, similarity: Array) -> str:
    """The part of at most 300 characters with the greatest sum of MaxSim."""
    if not similarity.any():
        return text[:_LONGEST_MATCH]
    starts, stops = tokens.spans.T
    best, best_score = text[:_LONGEST_MATCH], -np.inf
    for begin in _beginnings(text, starts.tolist()):
        inside = (starts >= begin) & (stops <= begin + _LONGEST_MATCH)
        if not inside.any():
            continue
        score = similarity[:, inside].max(axis=1).sum()
        # Of two with the same tokens the one that begins nearer to them.
        if score >= best_score:
            best, best_score = text[begin : stops[inside].max()], score
    return best


def _beginnings(text: str, starts: list[int]) -> list[int]:
    """Where sentences and lines begin, and words where these are long."""
    places = [0]
    for start in starts:
        before = text[places[-1] : start]
        is_far = 2 * len(before) > _LONGEST_MATCH and before[-1:].isspace()
        if is_far or len(before) > _LONGEST_MATCH or _ENDS.search(before):
            places.append(start)
    return places
