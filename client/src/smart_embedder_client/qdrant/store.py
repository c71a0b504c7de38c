"""What the programs need of a collection, whichever Qdrant has it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from smart_embedder_client.answers import SparseVector
from smart_embedder_client.qdrant.layout import Layout
from smart_embedder_client.safetensors import Array

# The keys of a point's payload.
TEXT, SOURCE, DATASET, MODEL, METADATA = "text", "source", "dataset", "model", "metadata"

PAGE = 1_000


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """The vectors of one text: dense `[width]`, ColBERT `[vectors, width]`; None if left out."""

    dense: Array | None = None
    sparse: SparseVector | None = None
    colbert: Array | None = None

    @property
    def numbers(self) -> int:
        """How many there are, ids of sparse tokens included."""
        sparse = 0 if self.sparse is None else 2 * len(self.sparse.indices)
        return sparse + sum(each.size for each in (self.dense, self.colbert) if each is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One chunk, with its vectors."""

    id: str
    vectors: Vectors
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hit:
    """A point that was found; its payload stands in the last two stages only."""

    id: str
    score: float
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Depths:
    """How many points each stage keeps: of dense and sparse, of their fusion, of the end."""

    candidates: int
    fused: int
    limit: int


class Store(Protocol):
    """A collection of a Qdrant; all methods raise `QdrantError`.

    Attributes:
        streams: How many requests it can work on at a time.
        transport: How vectors get there, as told to people.
        bytes_per_number: What a number of a vector takes on the way, at most.
    """

    streams: int
    transport: str
    bytes_per_number: int

    def layout(self) -> Layout | None:
        """The vectors of the collection; None if it does not exist."""

    def create(self, layout: Layout) -> None:
        """Make the collection; its HNSW graph is not made before `start_indexing`."""

    def start_indexing(self) -> None:
        """Have the HNSW graph of the dense vectors made, unless there is one."""

    def existing(self, ids: Sequence[str]) -> set[str]:
        """Those of the points that the collection has."""

    def upsert(self, points: Sequence[Point]) -> None:
        """Store points; it returns when they can be found."""

    def delete(self, ids: Sequence[str]) -> None:
        """Remove points."""

    def count(self, dataset: str) -> int:
        """How many points a data set has."""

    def pages(self, dataset: str) -> Iterator[list[str]]:
        """The ids of the points of a data set."""

    def any_payload(self) -> Mapping[str, Any] | None:
        """The payload of some point; None if there is no point."""

    def search(self, query: Vectors, depths: Depths) -> dict[str, list[Hit]]:
        """The points of each stage by falling score.

        The stages are `dense` and `sparse`, `fused` (their reciprocal rank fusion, or the only one
        of them), and `colbert`; each stands there if the query has its vectors.
        """

    def close(self) -> None:
        """Let go of connections and files."""


def as_lists(array: Array) -> Any:
    """The numbers as Qdrant's clients take them."""
    return np.asarray(array, np.float32).tolist()
