"""Where vectors and scores come from: this engine in this process, or a running service."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import httpx2
import msgpack
import numpy as np

from smart_embedder.engine import Engine
from smart_embedder.engine.records import (
    NO_OPTIONS,
    EmbeddingOptions,
    EmbedRequest,
    Outputs,
    RerankRequest,
    SparseVector,
    TextEmbedding,
)
from smart_embedder.errors import InvalidRequestError
from smart_embedder.models.load import load_models
from smart_embedder.settings import NO_RERANKER, Settings
from tools.evaluate.representations import COLBERT, DENSE, KINDS, SPARSE, Kinds

# Passages of one rerank request; the service takes 1,024.
_PASSAGES = 256
_TRIES = 20
_FEWEST_DIMENSIONS = 32
_LATER = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}


class SourceError(Exception):
    """A source cannot give what was asked for; the message is one sentence."""


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
    with suppress(InvalidRequestError, SourceError):
        while (width := width // 2) >= _FEWEST_DIMENSIONS:
            await source.embed(["a"], frozenset({DENSE}), EmbeddingOptions(dimensions=width))
            taken.append(width)
    kinds = frozenset(kind for kind in KINDS if getattr(found, kind) is not None)
    return Made(kinds, tuple(taken))


class EngineSource:
    """The engine in this process."""

    name = "this engine"

    def __init__(self, engine: Engine, settings: Settings) -> None:
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
async def engine_source(settings: Settings) -> AsyncIterator[EngineSource]:
    """The engine with its models loaded; raises `StartupError` where they cannot be."""
    async with Engine(settings, load_models) as engine:
        yield EngineSource(engine, settings)


class ServiceSource:
    """A running service: its default models, or those of MODELS that are named."""

    def __init__(self, client: httpx2.AsyncClient, model: str | None, reranker: str | None) -> None:
        self._client = client
        self._model = model
        self._reranker = reranker
        self.name = f"{model or 'the service'} at {client.base_url}"
        self.reranks = True

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
        answer, seconds = await self._post("/embeddings/", body, "application/msgpack")
        data = msgpack.unpackb(answer, object_hook=_array)
        embeddings = [_embedding(item["embeddings"]) for item in data["data"]]
        return Embedded(embeddings, data["usage"]["total_tokens"], seconds)

    async def rerank(self, query: str, passages: list[str]) -> list[float]:
        """As `Source.rerank`."""
        scores = [0.0] * len(passages)
        for begin in range(0, len(passages), _PASSAGES):
            some = passages[begin : begin + _PASSAGES]
            body = {"query": query, "passages": some, "model": self._reranker}
            answer, _ = await self._post("/rerank", body, "application/json")
            for each in json.loads(answer)["results"]:
                scores[begin + each["index"]] = each["score"]
        return scores

    async def _post(self, path: str, body: Any, accept: str) -> tuple[bytes, float]:
        """The answer and its seconds; waits as the service asks where it has no room now."""
        for _ in range(_TRIES):
            began = time.perf_counter()
            try:
                answer = await self._client.post(path, json=body, headers={"Accept": accept})
            except httpx2.HTTPError as error:
                raise SourceError(f"{self.name} does not answer: {error!r}") from None
            if answer.status_code not in _LATER:
                break
            await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
        if answer.status_code != HTTPStatus.OK:
            raise SourceError(f"{self.name} answered {answer.status_code}: {answer.text}")
        return answer.content, time.perf_counter() - began


@asynccontextmanager
async def service_source(
    url: str, token: str | None, model: str | None, reranker: str | None
) -> AsyncIterator[ServiceSource]:
    """The service at `url`; raises `SourceError` where it is not ready."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=None) as client:
        source = ServiceSource(client, model, reranker)
        try:
            health = (await client.get("/health")).json()
        except (httpx2.HTTPError, ValueError) as error:
            raise SourceError(f"{source.name} does not answer: {error}") from None
        if health.get("status") != "healthy":
            raise SourceError(f"{source.name} is not ready: {health.get('reason')}")
        source.reranks = bool(reranker) or health["reranker_model"] != NO_RERANKER
        yield source


def _array(record: dict[Any, Any]) -> Any:
    """An array as msgpack-numpy writes it; any other map as it is."""
    if b"nd" not in record:
        return record
    # PyTorch, which rounds to half precision, warns of arrays that cannot be written.
    return np.array(np.frombuffer(record[b"data"], record[b"type"]).reshape(record[b"shape"]))


def _embedding(vectors: dict[str, Any]) -> TextEmbedding:
    if sparse := vectors["sparse"]:
        sparse = SparseVector(sparse["indices"].astype(np.int64), sparse["values"])
    return TextEmbedding(vectors["dense"], sparse, vectors["colbert"])
