"""How far the vectors of a collection are from those that the service makes of the same texts."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from smart_embedder_client.answers import SparseVector
from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.ingest.embedding import Embedder, Refusal, VectorOptions
from smart_embedder_client.ingest.pace import Patience
from smart_embedder_client.qdrant.store import (
    COLBERT,
    DENSE,
    SPARSE,
    TEXT,
    Datatype,
    Point,
    Store,
    Vectors,
)
from smart_embedder_client.safetensors import Array

# How much the cosine of two vectors of one text may be below 1, by what one of them is computed or
# stored with. Of int8, the worst that was measured is 0.005.
TOLERANCES = {"float32": 0.0002, "float16": 0.001, "bfloat16": 0.005, "uint8": 0.005, "int8": 0.01}
# ColBERT vectors of a text are a megabyte or two.
_TEXTS_AT_ONCE = 8


def number_type(precision: str) -> str:
    """The type of numbers in what the service says, such as `int8/native.avx2.0123456789ab`."""
    return precision.partition("/")[0]


@dataclass(slots=True)
class Drift:
    """The cosines between the stored and the new vectors of some texts, of one kind."""

    tolerance: float
    cosines: list[float] = field(default_factory=list)

    @property
    def drifted(self) -> int:
        """How many texts have other vectors now."""
        return sum(cosine < 1 - self.tolerance for cosine in self.cosines)

    @property
    def median(self) -> float:
        """The median of the cosines."""
        return statistics.median(self.cosines)

    @property
    def worst(self) -> float:
        """The smallest cosine."""
        return min(self.cosines)

    def as_dict(self) -> dict[str, float]:
        """It as JSON."""
        names = ("drifted", "median", "worst", "tolerance")
        return {"texts": len(self.cosines)} | {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """It in a few words."""
        share = f"{self.drifted} of {len(self.cosines)} texts have other vectors"
        return f"{share} (cosine {self.median:.4f} at the median, {self.worst:.4f} at worst)"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Embeds stored texts anew.

    `precisions` are those of the service and of the collection, for each kind; a kind of which one
    is not known has the tolerance of the coarsest.
    """

    client: AsyncClient
    store: Store
    patience: Patience
    datatype: Datatype
    precisions: Sequence[Mapping[str, str]]
    tolerance: float | None = None
    advance: Callable[[int], None] = lambda _: None

    async def run(self, kinds: frozenset[str], count: int) -> dict[str, Drift]:
        """How far the vectors of so many points have drifted, for each kind that one has.

        Raises `QdrantError` and `SmartEmbedderError`.
        """
        points = await self.patience.ask(self.store.sample, count)
        ids = [each.id for each in points if isinstance(each.payload.get(TEXT), str)]
        drifts = {kind: Drift(self._tolerance(kind)) for kind in (DENSE, SPARSE, COLBERT)}
        for start in range(0, len(ids), _TEXTS_AT_ONCE):
            some = ids[start : start + _TEXTS_AT_ONCE]
            stored = await self.patience.ask(partial(self.store.read, some, with_vectors=True))
            for kind, cosine in await self._cosines(stored, kinds):
                drifts[kind].cosines.append(cosine)
            self.advance(len(some))
        return {kind: drift for kind, drift in drifts.items() if drift.cosines}

    def _tolerance(self, kind: str) -> float:
        if self.tolerance is not None:
            return self.tolerance
        types = [number_type(each.get(kind, "")) for each in self.precisions]
        types += [] if kind == SPARSE else [self.datatype]
        return max(TOLERANCES.get(each, max(TOLERANCES.values())) for each in types)

    async def _cosines(
        self, stored: Sequence[Point], kinds: frozenset[str]
    ) -> list[tuple[str, float]]:
        """The cosine of each kind of each point; a text that is refused has none."""
        made = await self._embed(stored, kinds)
        is_shifted = self.datatype == "uint8"
        found = []
        for point, new in zip(stored, made, strict=True):
            old = point.vectors
            if isinstance(new, Refusal):
                continue
            if old.dense is not None and DENSE in kinds:
                found.append((DENSE, _cosine(old.dense, new.dense, is_shifted=is_shifted)))
            if old.sparse is not None and SPARSE in kinds:
                found.append((SPARSE, _sparse_cosine(old.sparse, new.sparse)))
            if old.colbert is not None and COLBERT in kinds:
                pooled = await self._pooled(point, old.colbert, new.colbert)
                found.append((COLBERT, _cosine(old.colbert, pooled, is_shifted=is_shifted)))
        return found

    async def _embed(
        self, points: Sequence[Point], kinds: frozenset[str], pool_factor: int | None = None
    ) -> list[Vectors | Refusal]:
        options = VectorOptions(kinds, self.datatype, pool_factor)
        embedder = Embedder(self.client, options, self.patience, None)
        return await embedder.embed([str(each.payload[TEXT]) for each in points])

    async def _pooled(self, point: Point, old: Array, new: Array | None) -> Array | None:
        """The new ColBERT vectors, of which similar ones become one as before.

        The number alone tells by which factor: all that make it pool in the same way.
        """
        if new is None or len(new) <= len(old):
            return new
        (vectors,) = await self._embed([point], frozenset({COLBERT}), len(new) // len(old))
        return None if isinstance(vectors, Refusal) else vectors.colbert


def _cosine(old: Array, new: Array | None, *, is_shifted: bool) -> float:
    """That of two vectors, or the mean of those of their rows; 0 if their shapes differ.

    A shift that all numbers have, as in uint8, is taken off with their mean.
    """
    if new is None or old.shape != new.shape:
        return 0.0
    first, second = (np.atleast_2d(each).astype(np.float64) for each in (old, new))
    if is_shifted:
        first, second = (each - each.mean(axis=1, keepdims=True) for each in (first, second))
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    products = (first * second).sum(axis=1)
    return float(np.divide(products, lengths, out=np.zeros_like(lengths), where=lengths > 0).mean())


def _sparse_cosine(old: SparseVector, new: SparseVector | None) -> float:
    """That of two texts' weights; 0 if one has none."""
    if new is None:
        return 0.0
    first, second = old.as_dict(), new.as_dict()
    product = sum(weight * second.get(token, 0.0) for token, weight in first.items())
    length = math.hypot(*first.values()) * math.hypot(*second.values())
    return product / length if length else 0.0
