"""Where vectors and scores come from: this engine in this process, or a running service."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from smart_embedder.api.formats.binary import SAFETENSORS
from smart_embedder.engine import Engine
from smart_embedder.engine.records import (
    NO_OPTIONS,
    EmbeddingOptions,
    EmbedRequest,
    Outputs,
    RerankRequest,
    TextEmbedding,
)
from smart_embedder.errors import InvalidRequestError
from smart_embedder.models.load import load_models
from smart_embedder.settings.engine import NO_RERANKER, EngineSettings
from tools.answers import embeddings_in
from tools.evaluate.representations import COLBERT, DENSE, KINDS, SPARSE, Kinds
from tools.service import EMBED, RERANK, Service, ServiceError

# Passages of one rerank request; the service takes 1,024.
_PASSAGES = 256
_TRIES = 20
_FEWEST_DIMENSIONS = 32
_LATER = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors of some texts, their tokens where the source tells, and the answer's seconds."""

    embeddings: list[TextEmbedding]
    tokens: int | None
    seconds: float


class Source(Protocol):
    """Gives vectors, and scores of passages; several calls may be under way."""

    @property
    def name(self) -> str:
        """What stands in the report."""

    @property
    def reranks(self) -> bool:
        """Whether it has a reranker."""

    async def embed(
        self, texts: list[str], kinds: Kinds | None = None, options: EmbeddingOptions = NO_OPTIONS
    ) -> Embedded:
        """The vectors of the kinds asked for, or of all that are made, of unit length.

        Of the options the prompts count.
        """

    async def rerank(self, query: str, passages: list[str]) -> list[float]:
        """A score of each passage."""


@dataclass(frozen=True, slots=True)
class Made:
    """The kinds of vectors that a source makes, and the fewer `dimensions` of dense ones."""

    kinds: Kinds
    dimensions: tuple[int, ...] = ()

    @property
    def reads_queries_apart(self) -> bool:
        """Whether its token vectors are of a ColBERT model, which reads queries in another way.

        A model of bge-m3's kind does not, and makes sparse vectors, too.
        """
        return COLBERT in self.kinds and SPARSE not in self.kinds


async def look_at(source: Source) -> Made:
    """What a source makes."""
    (found,) = (await source.embed(["a"])).embeddings
    taken: list[int] = []
    width = 0 if found.dense is None else len(found.dense)
    # A half of the width, a quarter and so on, as long as the source gives them.
    with suppress(InvalidRequestError, ServiceError):
        while (width := width // 2) >= _FEWEST_DIMENSIONS:
            await source.embed(["a"], frozenset({DENSE}), EmbeddingOptions(dimensions=width))
            taken.append(width)
    kinds = frozenset(kind for kind in KINDS if getattr(found, kind) is not None)
    return Made(kinds, tuple(taken))


class EngineSource:
    """The engine in this process."""

    name = "this engine"

    def __init__(self, engine: Engine, settings: EngineSettings) -> None:
        self._engine = engine
        self.reranks = settings.reranker_model != NO_RERANKER

    async def embed(
        self, texts: list[str], kinds: Kinds | None = None, options: EmbeddingOptions = NO_OPTIONS
    ) -> Embedded:
        """As `Source.embed`."""
        began = time.perf_counter()
        async with self._engine.lease() as models:
            made = [kind for kind in KINDS if getattr(models.kinds, kind)]
            request = EmbedRequest(
                texts,
                Outputs.of(made if kinds is None else kinds),
                normalize_dense=True,
                prompt=options.prompt,
                input_type=options.input_type,
                dimensions=options.dimensions,
            )
            result = await self._engine.embedding.embed(models, request)
        return Embedded(result.embeddings, result.tokens, time.perf_counter() - began)

    async def rerank(self, query: str, passages: list[str]) -> list[float]:
        """As `Source.rerank`."""
        scores: list[float] = []
        for begin in range(0, len(passages), _PASSAGES):
            some = passages[begin : begin + _PASSAGES]
            result = await self._engine.rerank(RerankRequest(query, some))
            scores += result.scores
        return scores


@asynccontextmanager
async def engine_source(settings: EngineSettings) -> AsyncIterator[EngineSource]:
    """The engine with its models loaded; raises `StartupError` where they cannot be."""
    async with Engine(settings, load_models) as engine:
        yield EngineSource(engine, settings)


class ServiceSource:
    """A running service: its default models, or those of MODELS that are named."""

    def __init__(self, service: Service, model: str | None, reranker: str | None) -> None:
        self._service = service
        self._model = model
        self._reranker = reranker
        self.name = f"{model or 'the service'} at {service.url}"
        self.reranks = bool(reranker) or service.health["reranker_model"] != NO_RERANKER

    async def embed(
        self, texts: list[str], kinds: Kinds | None = None, options: EmbeddingOptions = NO_OPTIONS
    ) -> Embedded:
        """As `Source.embed`."""
        body: dict[str, Any] = {"sentences": texts, "normalize_dense": True, "model": self._model}
        if kinds is not None:
            body |= {f"return_{kind}": kind in kinds for kind in KINDS}
        fields = ("prompt", "input_type", "dimensions")
        given = {name: getattr(options, name) for name in fields}
        body |= {name: value for name, value in given.items() if value is not None}
        answer = await asyncio.to_thread(self._service.work, EMBED, body, SAFETENSORS)
        embeddings, told = embeddings_in(answer.content)
        return Embedded(embeddings, told["usage"]["total_tokens"], answer.elapsed.total_seconds())

    async def rerank(self, query: str, passages: list[str]) -> list[float]:
        """As `Source.rerank`."""
        scores = [0.0] * len(passages)
        for begin in range(0, len(passages), _PASSAGES):
            some = passages[begin : begin + _PASSAGES]
            body = {"query": query, "passages": some, "model": self._reranker}
            answer = await asyncio.to_thread(self._service.work, RERANK, body)
            for each in answer.json()["results"]:
                scores[begin + each["index"]] = each["score"]
        return scores


@asynccontextmanager
async def service_source(
    url: str, token: str | None, model: str | None, reranker: str | None
) -> AsyncIterator[ServiceSource]:
    """The service at `url`; raises `ServiceError` where it is not ready."""
    with closing(Service(url, token, later=_LATER, tries=_TRIES)) as service:
        service.require_ready()
        yield ServiceSource(service, model, reranker)
