"""`python -m tools.verify`: prove on your own models and hardware that this engine is right.

Runs the configured models through this engine and through the reference implementations, prints the
largest difference of every output, and exits with 1 where one is out of tolerance. DTYPE=auto means
float32 here; any other format is compared with the references' float32 at a wider tolerance. Before
that it prints, for each path that an operation could take on this machine, what its trial showed.
"""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from app.engine import Engine, RerankRequest
from app.engine.loaded_models import ModelInfo
from app.engine.types import EmbeddingResult, FloatArray, RerankResult
from app.errors import StartupError
from app.models.checkpoint.sentence_config import read_pooling
from app.models.load import load_models
from app.models.runtime import ModelFolders, locate_models
from app.settings import NO_RERANKER, Settings
from app.settings.sources import load_settings
from tools.verify import references
from tools.verify.paths import path_rows, print_paths
from tools.verify.texts import PASSAGES, QUERY, TEXTS

_FLOAT32_TOLERANCE = 1e-4
_HALF_TOLERANCE = 5e-2
# The references pad; beyond this length their attention needs gigabytes.
_LONGEST = 2048


@dataclass(frozen=True, slots=True)
class Row:
    """The largest difference of one output, and how large it may be."""

    output: str
    reference: str
    compared: int
    difference: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the difference is within tolerance; never so for a NaN."""
        return self.difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class Ours:
    """What this engine returned."""

    embedding: EmbeddingResult
    rerank: RerankResult | None

    @property
    def makes_dense(self) -> bool:
        """Whether a model makes dense vectors."""
        return self.embedding.embeddings[0].dense is not None


@dataclass(frozen=True)
class Verification:
    """One run: the settings, this engine's results, and where the models lie."""

    settings: Settings
    ours: Ours

    @property
    def tolerance(self) -> float:
        """The largest difference that rounding explains."""
        return _FLOAT32_TOLERANCE if self.settings.dtype == "float32" else _HALF_TOLERANCE

    def rows(self) -> Iterator[Row]:
        """One row for each output of the configured models."""
        is_m3 = references.is_m3(self.folders.embedding)
        if is_m3:
            yield from self._m3_rows()
        if self.ours.makes_dense and not (is_m3 and self.folders.dense is None):
            yield self._dense_row()
        if self.ours.rerank is not None:
            yield self._rerank_row(self.ours.rerank)

    @cached_property
    def folders(self) -> ModelFolders:
        """Where the models lie."""
        return locate_models(self.settings)

    def _m3_rows(self) -> Iterator[Row]:
        folder = self.folders.embedding
        limit = references.m3_limit(self.settings, folder)
        theirs = references.m3_vectors(folder, TEXTS, limit, read_pooling(folder))
        ours = self.ours.embedding.embeddings
        if self.settings.dense_model == self.settings.embedding_model:
            difference = _largest(np.array([e.dense for e in ours]), theirs.dense)
            yield self._row("dense", "FlagEmbedding", difference, len(ours))
        sparse = [
            dict(zip(e.sparse.indices.tolist(), e.sparse.values.tolist(), strict=True))
            for e in ours
            if e.sparse is not None
        ]
        yield self._row(
            "sparse", "FlagEmbedding", _largest_sparse(sparse, theirs.sparse), len(ours)
        )
        colbert = [e.colbert for e in ours if e.colbert is not None]
        difference = max(_largest(a, b) for a, b in zip(colbert, theirs.colbert, strict=True))
        yield self._row("colbert", "FlagEmbedding", difference, len(ours))

    def _dense_row(self) -> Row:
        """Of a model that makes dense vectors alone."""
        folder = self.folders.dense or self.folders.embedding
        reference, theirs = references.dense_vectors(self.settings, folder, TEXTS)
        ours = np.array([e.dense for e in self.ours.embedding.embeddings])
        # Raw states grow with the width of the model: the directions are what is compared.
        difference = _largest(_unit(ours), _unit(theirs))
        return self._row("dense", reference, difference, len(ours))

    def _rerank_row(self, result: RerankResult) -> Row:
        reference, theirs = references.rerank_scores(self.settings, self.folders, QUERY, PASSAGES)
        difference = _largest(np.array(result.scores), np.array(theirs))
        return self._row("rerank score", reference, difference, len(theirs))

    def _row(self, output: str, reference: str, difference: float, compared: int) -> Row:
        return Row(output, reference, compared, difference, self.tolerance)


async def run_engine(settings: Settings) -> Ours:
    """Embed and, where there is a reranker, rerank the texts of this check."""
    async with Engine(settings, load_models) as engine:
        if engine.models is not None:
            print_models(engine.models.infos)
        embedding = await engine.embed(TEXTS)
        if settings.reranker_model == NO_RERANKER:
            return Ours(embedding, None)
        return Ours(embedding, await engine.rerank(RerankRequest(QUERY, PASSAGES)))


def comparable(settings: Settings) -> Settings:
    """The settings with lengths that the padding references can run, and a definite dtype."""
    return settings.model_copy(
        update={
            "dtype": "float32" if settings.dtype == "auto" else settings.dtype,
            "bge_embed_max_length": min(settings.embed_max_length, _LONGEST),
            "qwen_embed_max_length": min(settings.qwen_embed_max_length, _LONGEST),
            "bge_rerank_max_length": min(settings.bge_rerank_max_length, _LONGEST),
            "qwen_rerank_max_length": min(settings.qwen_rerank_max_length, _LONGEST),
            "rerank_gpu_timeout": 3600.0,
            "request_timeout": 7200.0,
        }
    )


def print_models(infos: Sequence[ModelInfo]) -> None:
    """What computes each operation of the loaded models."""
    for info in infos:
        paths = ", ".join(f"{operation} by {path}" for operation, path in info.paths.items())
        print(f"{info.name} in {info.dtype}: {paths}.")
    print()


def print_table(rows: list[Row]) -> None:
    """The rows and the verdict."""
    print(
        f"{'Output':14}{'Reference':16}{'Compared':>9}{'Largest difference':>20}{'Tolerance':>11}"
    )
    for row in rows:
        verdict = "ok" if row.agrees else "OUT OF TOLERANCE"
        figures = f"{row.compared:9}{row.difference:20.2e}{row.tolerance:11.0e}"
        print(f"{row.output:14}{row.reference:16}{figures}  {verdict}")
    agreed = sum(row.agrees for row in rows)
    print(f"\n{agreed} of {len(rows)} outputs agree with their reference.")


def main() -> int:
    """Compare, print, and return the exit status."""
    try:
        settings = comparable(load_settings())
        print_paths([row for name in settings.devices for row in path_rows(name)])
        ours = asyncio.run(run_engine(settings))
        rows = list(Verification(settings, ours).rows())
    except StartupError as error:
        print(f"The check cannot run: {error}", file=sys.stderr)
        return 2
    print_table(rows)
    return 0 if all(row.agrees for row in rows) else 1


def _largest(ours: FloatArray, theirs: FloatArray) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.abs(ours - theirs).max(initial=0.0))


def _largest_sparse(ours: list[dict[int, float]], theirs: list[dict[int, float]]) -> float:
    """Over the tokens of either side: one that the other lacks counts with its whole weight."""
    differences = (
        abs(mine.get(token, 0.0) - other.get(token, 0.0))
        for mine, other in zip(ours, theirs, strict=True)
        for token in mine.keys() | other.keys()
    )
    # A model may give no token of these texts a weight.
    return max(differences, default=0.0)


def _unit(vectors: FloatArray) -> FloatArray:
    unit: FloatArray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


if __name__ == "__main__":
    sys.exit(main())
