"""Which tokens of a passage match the question."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smart_embedder_client.answers import Embeddings, SparseVector
from smart_embedder_client.client import Client
from smart_embedder_client.safetensors import Array


@dataclass(frozen=True, slots=True)
class SharedTerm:
    """A token that both have; its weights multiplied are its part of the sparse score."""

    token: str
    query_weight: float
    passage_weight: float

    @property
    def product(self) -> float:
        """What it adds to the score."""
        return self.query_weight * self.passage_weight


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
    """The matching tokens of each passage, of vectors that are computed anew.

    Raises:
        SmartEmbedderError: The service does not answer.
    """
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
    weights = _by_token(answer.sparse[passage])
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
    return sorted(terms, key=lambda term: -term.product)


def _by_token(sparse: SparseVector) -> dict[int, float]:
    return dict(zip(sparse.indices.tolist(), sparse.values.tolist(), strict=True))


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
