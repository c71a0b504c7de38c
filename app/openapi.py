"""Serves /openapi.json: FastAPI's description of the routes, with the effective limits."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from app.context import METRICS_PATHS
from app.routing import Paths
from app.schemas import OPENAI_TEXTS, EmbeddingRequest, ExtractBody, RerankBody
from app.service import Service
from app.settings import Settings
from smart_embedder.interface import LoadedModels

_LIMITS = """\
Dense, sparse and ColBERT vectors for hybrid search, on your own hardware.

<details><summary>The limits of this server</summary>

| limit | embeddings | rerank | set by |
|---|---|---|---|
| texts in a request | {settings.max_sentences_per_request:,}; at least {openai_texts:,} on \
OpenAI's and Ollama's paths | {settings.max_rerank_passages:,} \
| `MAX_SENTENCES_PER_REQUEST`, `MAX_RERANK_PASSAGES` |
| size of a request | {body} | {body} | `MAX_BODY_BYTES` |
| seconds of a request | {settings.request_timeout:g} | {settings.request_timeout:g}, \
of them {settings.rerank_gpu_timeout:g} in forwards | `REQUEST_TIMEOUT`, `RERANK_GPU_TIMEOUT` |
| tokens that are read | {embed_lengths} | {rerank_lengths} | `BGE_EMBED_MAX_LENGTH`, \
`QWEN_EMBED_MAX_LENGTH`, `BGE_RERANK_MAX_LENGTH`, `QWEN_RERANK_MAX_LENGTH` |
| tokens in one forward | {tokens} | {rerank_tokens} | `MAX_BATCH_TOKENS` |
| pairs in one forward |  | {pairs} | `QWEN_RERANK_BATCH_SIZE` |
| requests of all clients | {settings.max_queue_size:,} | {settings.rerank_max_queue:,} \
| `MAX_QUEUE_SIZE`, `RERANK_MAX_QUEUE` |
| requests of one client | {settings.rate_limit_burst_size:,} at once and \
{settings.rate_limit_requests_per_minute:,} a minute | counted together with embeddings \
| `RATE_LIMIT_BURST_SIZE`, `RATE_LIMIT_REQUESTS_PER_MINUTE` |

</details>"""
_TOKEN = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token of API_TOKEN or API_TOKENS_FILE",
}


def install_openapi(app: FastAPI, service: Service, paths: Paths) -> None:
    """Serve /openapi.json, which /docs and /redoc show, with this server's limits and locks."""
    create_description = app.openapi
    settings = service.settings

    def describe() -> dict[str, Any]:
        description = create_description()  # The same object at each call.
        description["info"]["description"] = _describe_limits(settings, service.models)
        schemas = description["components"]["schemas"]
        for schema, field, max_items in (
            (EmbeddingRequest, "sentences", settings.max_sentences_per_request),
            (RerankBody, "passages", settings.max_rerank_passages),
            (ExtractBody, "texts", settings.max_sentences_per_request),
        ):
            schemas[schema.__name__]["properties"][field]["maxItems"] = max_items
        if settings.requires_token:
            _add_locks(description, paths, METRICS_PATHS if settings.protect_metrics else ())
        return description

    def serve(request: Request) -> JSONResponse:
        """Serve it in a thread, because the first call takes a third of a second."""
        prefix = request.scope.get("root_path", "").rstrip("/")
        return JSONResponse(describe() | ({"servers": [{"url": prefix}]} if prefix else {}))

    app.openapi = describe  # type: ignore[method-assign]
    app.add_route("/openapi.json", serve, include_in_schema=False)


def _add_locks(description: dict[str, Any], paths: Paths, protected: Sequence[str]) -> None:
    """Mark the operations that need a token: those of paths that are not public, and all work."""
    description["components"]["securitySchemes"] = {"HTTPBearer": _TOKEN}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            is_public = method == "get" and paths.find(path).is_public and path not in protected
            if not is_public:
                operation["security"] = [{"HTTPBearer": []}]


def _describe_limits(settings: Settings, models: LoadedModels | None) -> str:
    """Describe the effective limits of a request: its size, its tokens and its time."""
    unknown = "known once the models are loaded"
    embed_lengths = rerank_lengths = tokens = rerank_tokens = pairs = unknown
    if models is not None:
        embedders = [model for model in (models.dense, models.embedder) if model is not None]
        embed_lengths = ", ".join(
            f"{model.max_length:,} of a text by {model.name}" for model in embedders
        )
        reranker, tokens, pairs = models.reranker, f"{models.max_batch_tokens:,}", "no limit"
        rerank_tokens = f"{models.max_rerank_tokens or models.max_batch_tokens:,}"
        if models.late_interaction:
            rerank_lengths = f"{models.embedder.max_length:,} of a text by {models.embedder.name}"
        elif reranker is None:
            rerank_lengths = "none: reranking is switched off"
        else:
            rerank_lengths = f"{reranker.max_length:,} of query and passage by {reranker.name}"
        if reranker is not None and reranker.max_batch_sequences is not None:
            pairs = f"{reranker.max_batch_sequences:,}"
    return _LIMITS.format(
        openai_texts=OPENAI_TEXTS,
        settings=settings,
        body=_binary_size(settings.max_body_bytes),
        embed_lengths=embed_lengths,
        rerank_lengths=rerank_lengths,
        tokens=tokens,
        rerank_tokens=rerank_tokens,
        pairs=pairs,
    )


def _binary_size(size: int) -> str:
    """Write bytes in the largest unit that gives a whole number."""
    units = ["bytes", "KiB", "MiB", "GiB"]
    while size % 1024 == 0 and len(units) > 1:
        size //= 1024
        del units[0]
    return f"{size:,} {units[0]}"
