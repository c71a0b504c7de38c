"""The API's description as this server keeps it: its limits in force, and its locks."""

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from app.api.body import with_most_items
from app.api.service import BEARER_NAME, Service
from app.engine.loaded_models import LoadedModels
from app.observability.metrics import EMBEDDING_ENDPOINT, RERANK_ENDPOINT
from app.settings import Settings

_ABOUT = "Dense, sparse and ColBERT vectors for hybrid search, on your own hardware."
_PROTECTED = ("/stats", "/metrics")
_NOT_YET = "known once the models are loaded"


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of both endpoints, and the settings, one or one for each, that change it."""

    what: str
    embeddings: object
    rerank: object
    settings: tuple[str, ...]

    def as_row(self) -> str:
        """A row of a table in Markdown."""
        names = ", ".join(f"`{name}`" for name in self.settings)
        return f"| {self.what} | {self.embeddings} | {self.rerank} | {names} |"


def install_description(app: FastAPI, service: Service) -> None:
    """Let /openapi.json, and so /docs and /redoc, tell what holds here and now."""
    fixed = app.openapi

    def describe() -> dict[str, Any]:
        description = fixed()
        limits = limits_in_force(service.settings, service.engine.models)
        return description | {
            "info": description["info"] | {"description": f"{_ABOUT}\n\n{_as_table(limits)}"},
            "paths": _paths(description["paths"], service.settings),
        }

    app.openapi = describe  # type: ignore[method-assign]


def limits_in_force(settings: Settings, models: LoadedModels | None) -> list[Limit]:
    """What a request may hold, how much of it is read, and how long it may take."""
    return [*_of_a_request(settings), *_of_its_texts(models), *_of_the_service(settings)]


def _as_table(limits: list[Limit]) -> str:
    head = "| limit | embeddings | rerank | set by |\n|---|---|---|---|"
    return "\n".join(["The limits of this server:", "", head, *(each.as_row() for each in limits)])


def _of_a_request(settings: Settings) -> list[Limit]:
    return [
        Limit(
            "texts in a request",
            settings.max_sentences_per_request,
            settings.max_rerank_passages,
            ("MAX_SENTENCES_PER_REQUEST", "MAX_RERANK_PASSAGES"),
        ),
        Limit(
            "bytes of a request",
            settings.max_body_bytes,
            settings.max_body_bytes,
            ("MAX_BODY_BYTES",),
        ),
        Limit(
            "seconds of a request",
            f"{settings.request_timeout:g}",
            f"{settings.request_timeout:g}, of them {settings.rerank_gpu_timeout:g} in forwards",
            ("REQUEST_TIMEOUT", "RERANK_GPU_TIMEOUT"),
        ),
    ]


def _of_its_texts(models: LoadedModels | None) -> list[Limit]:
    tokens = _NOT_YET if models is None else models.max_batch_tokens
    embed_lengths = ("BGE_EMBED_MAX_LENGTH", "QWEN_EMBED_MAX_LENGTH")
    rerank_lengths = ("BGE_RERANK_MAX_LENGTH", "QWEN_RERANK_MAX_LENGTH")
    return [
        Limit(
            "tokens that are read",
            _embed_lengths(models),
            _rerank_length(models),
            embed_lengths + rerank_lengths,
        ),
        Limit("tokens in one forward", tokens, tokens, ("MAX_BATCH_TOKENS",)),
        Limit("pairs in one forward", "", _most_pairs(models), ("QWEN_RERANK_BATCH_SIZE",)),
    ]


def _of_the_service(settings: Settings) -> list[Limit]:
    rate = (
        f"{settings.rate_limit_burst_size} at once and "
        f"{settings.rate_limit_requests_per_minute} a minute"
    )
    names = ("RATE_LIMIT_BURST_SIZE", "RATE_LIMIT_REQUESTS_PER_MINUTE")
    return [
        Limit(
            "requests of all clients",
            settings.max_queue_size,
            settings.rerank_max_queue,
            ("MAX_QUEUE_SIZE", "RERANK_MAX_QUEUE"),
        ),
        Limit("requests of one client", rate, "counted together with embeddings", names),
    ]


def _embed_lengths(models: LoadedModels | None) -> str:
    if models is None:
        return _NOT_YET
    embedders = [each for each in (models.dense, models.embedder) if each is not None]
    return ", ".join(f"{each.max_length} of a text by {each.name}" for each in embedders)


def _rerank_length(models: LoadedModels | None) -> str:
    if models is None:
        return _NOT_YET
    if models.late_interaction:
        return f"{models.embedder.max_length} of a text by {models.embedder.name}"
    if models.reranker is None:
        return "none: reranking is switched off"
    return f"{models.reranker.max_length} of query and passage by {models.reranker.name}"


def _most_pairs(models: LoadedModels | None) -> str:
    if models is None:
        return _NOT_YET
    most = models.reranker.max_batch_sequences if models.reranker else None
    return "no limit" if most is None else str(most)


def _paths(paths: dict[str, Any], settings: Settings) -> dict[str, Any]:
    most = {
        EMBEDDING_ENDPOINT: ("sentences", settings.max_sentences_per_request),
        RERANK_ENDPOINT: ("passages", settings.max_rerank_passages),
    }
    limited = {
        path: {"post": with_most_items(paths[path]["post"], field, number)}
        for path, (field, number) in most.items()
    }
    return paths | limited | (_locked(paths) if settings.protect_metrics else {})


def _locked(paths: dict[str, Any]) -> dict[str, Any]:
    lock: dict[str, Any] = {"security": [{BEARER_NAME: []}]}
    return {path: {"get": paths[path]["get"] | lock} for path in _PROTECTED}
