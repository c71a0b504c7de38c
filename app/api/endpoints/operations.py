"""GET /, /stats and /metrics; the last two show the same counters."""

import asyncio
import time
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from app import __version__
from app.api.context import context_of
from app.api.endpoints.health import describe_gpu
from app.api.endpoints.ui import UI_PATH
from app.api.handler import ServiceDep, get_and_head
from app.api.openapi import error_responses
from app.api.operation_schemas import IndexResponse, StatsResponse
from app.api.preferences import preference, preferences
from app.engine.loaded_models import LoadedModels
from app.observability.labels import EMBEDDING_ENDPOINT, RERANK_ENDPOINT
from app.observability.metrics import Metrics
from app.settings import Settings
from app.settings.model_names import public_name

router = APIRouter(tags=["operation"])


@get_and_head(router, "/", summary="What this is, and where to look", response_model=IndexResponse)
async def index(request: Request, service: ServiceDep) -> Response:
    """The service, its version, and its paths; a browser is sent to the page instead."""
    vary, prefix = {"Vary": "Accept"}, context_of(request.scope).prefix
    if service.settings.ui and _wants_html(request):
        # Relative where no proxy has said what it removes from paths.
        location = f"{prefix}{UI_PATH}" if prefix else UI_PATH.removeprefix("/")
        return RedirectResponse(location, HTTPStatus.SEE_OTHER, vary)
    paths = {
        "embeddings": EMBEDDING_ENDPOINT,
        "rerank": RERANK_ENDPOINT,
        "documentation": "/docs",
        "openapi": "/openapi.json",
        "health": "/health",
        "stats": "/stats",
        "metrics": "/metrics",
    }
    if service.settings.ui:
        paths["page"] = UI_PATH
    paths = {what: prefix + path for what, path in paths.items()}
    content = {"service": "Smart Embedder", "version": __version__, "paths": paths}
    return JSONResponse(content, headers=vary)


def _wants_html(request: Request) -> bool:
    """Whether it is a browser's: it names text/html, and JSON not as much."""
    wanted = preferences(preference(request.headers, "accept"))
    return wanted.get("text/html", 0) > wanted.get("application/json", 0)


@get_and_head(
    router,
    "/stats",
    summary="What was done since the start",
    response_model=StatsResponse,
    responses=error_responses(401),
)
async def stats(service: ServiceDep) -> Response:
    """Totals since the start; they are read from the Prometheus counters."""
    hardware = describe_gpu(service)
    return JSONResponse(totals(service.metrics) | {"hardware": hardware})


@get_and_head(
    router,
    "/metrics",
    summary="Prometheus metrics",
    response_class=PlainTextResponse,
    responses=error_responses(401),
)
async def metrics(service: ServiceDep) -> Response:
    """Every series, in Prometheus' text format."""
    # It takes milliseconds, during which the event loop must run.
    rendered = await asyncio.to_thread(service.metrics.render)
    return Response(rendered, media_type=CONTENT_TYPE_LATEST)


def totals(metrics: Metrics) -> dict[str, Any]:
    """The totals of /stats."""
    seconds = int(time.monotonic() - metrics.started_at)
    return {
        "uptime": f"{seconds // 3600}h {seconds // 60 % 60}m {seconds % 60}s",
        "uptime_seconds": seconds,
        "total_requests": metrics.total(metrics.embedding_requests)
        + metrics.total(metrics.rerank_requests),
        "total_sentences": metrics.total(metrics.sentences),
        "total_batches": int(metrics.value("embedding_batch_size_count")),
        "rejected_requests": metrics.total(metrics.embedding_rejected)
        + metrics.total(metrics.rerank_rejected),
    }


def describe_server(settings: Settings, models: LoadedModels) -> dict[str, str]:
    """The labels of embedding_server_info; the lengths in force may be lower than the settings."""
    dense, reranker = models.dense, models.reranker
    lengths = {
        "bge_embed_max_length": models.embedder.max_length,
        "qwen_embed_max_length": dense.max_length if dense else settings.qwen_embed_max_length,
        "bge_rerank_max_length": settings.bge_rerank_max_length,
        "qwen_rerank_max_length": settings.qwen_rerank_max_length,
    }
    if reranker is not None:
        kind = "bge" if reranker.scores_are_logits else "qwen"
        lengths[f"{kind}_rerank_max_length"] = reranker.max_length
    return {
        "model": public_name(settings.embedding_model),
        "dense_embedding_model": public_name(settings.dense_model),
        "reranker_model": public_name(settings.reranker_model),
        **{name: str(length) for name, length in lengths.items()},
        "version": __version__,
        "gpu_available": str(models.device.gpu_available).lower(),
        "device": models.device.name,
    }
