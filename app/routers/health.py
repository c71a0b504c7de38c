"""GET /, /stats and /metrics; the last two show the same counters."""

import asyncio
import time
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from app.context import context_of, preference, preferences
from app.handler import Service, ServiceDep
from app.http_metrics import EMBEDDING_ENDPOINT, RERANK_ENDPOINT, Metrics
from app.response_schemas import (
    HealthResponse,
    IndexResponse,
    LivenessResponse,
    StatsResponse,
)
from app.routers.pages import UI_PATH
from app.routing import Router
from app.settings import Settings
from smart_embedder import __version__
from smart_embedder.interface import LoadedModels
from smart_embedder.settings import public_name

_TAG = {"name": "operation", "description": "How the service is, and what it has done."}

router = Router(groups=[_TAG], tags=[_TAG["name"]], is_public=True)

Responses = dict[int | str, dict[str, Any]]

_HEALTH: Responses = {status: {"model": HealthResponse} for status in (200, 503)}
_LIVENESS: Responses = {status: {"model": LivenessResponse} for status in (200, 503)}


@router.get_and_head(
    "/health/ready", name="check_ready", summary="The same, for orchestrators", responses=_HEALTH
)
@router.get_and_head("/health", summary="Can this service answer?", responses=_HEALTH)
async def check_health(service: ServiceDep) -> Response:
    """200 once the models are warm; 503 with a reason while loading, draining or unhealthy."""
    download = service.downloads.current
    status, reason = service.status
    if status == "loading" and download is not None:
        reason = str(download)
    body = {
        "status": status,
        "reason": reason,
        "download": download and asdict(download) | {"percent": download.percent},
        "version": __version__,
    }
    return JSONResponse(body | describe(service), 200 if status == "healthy" else 503)


@router.get_and_head("/health/live", summary="Is a restart needed?", responses=_LIVENESS)
async def check_live(service: ServiceDep) -> Response:
    """200 unless the process should be restarted."""
    failure = service.engine.failure
    if failure is None:
        return JSONResponse({"status": "alive"})
    return JSONResponse({"status": "unhealthy", "reason": str(failure)}, 503)


def describe(service: Service) -> dict[str, Any]:
    """Models, limits and hardware; null where they are not known yet."""
    settings, models = service.settings, service.models
    length = settings.embed_max_length if models is None else models.embedder.max_length
    return {
        "gpu": describe_gpu(service),
        "model": public_name(settings.embedding_model),
        "dense_embedding_model": public_name(settings.dense_model),
        "reranker_model": public_name(settings.reranker_model),
        "models": [] if models is None else [asdict(info) for info in models.infos],
        "served_models": [
            asdict(status) | {"state": status.state.value} for status in service.engine.statuses
        ],
        "demo": models and models.demo,
        "max_input_length": length,
        "batch_size": models and max(1, models.max_batch_tokens // length),
        "max_requests_in_batch": settings.max_requests_in_batch,
        "max_batch_tokens": models and models.max_batch_tokens,
        "dtype": models and models.device.dtype,
        "attention": models and models.device.attention,
    }


def describe_gpu(service: Service) -> dict[str, Any]:
    """The `gpu` object of /health."""
    settings, models = service.settings, service.models
    device = None if models is None else models.device
    memory = None if device is None else device.memory_bytes
    return {
        "available": bool(device and device.gpu_available),
        "device_info": device.description if device else None,
        "memory_gb": round(memory / 2**30, 1) if memory else None,
        "device_count": device.device_count if device else 0,
        "multi_gpu_enabled": len(settings.devices) > 1 and "cuda" in settings.device,
        "configured_devices": [each.name for each in models.devices]
        if models
        else settings.devices,
        "failed_devices": service.engine.failed_devices,
    }


@router.get_and_head("/", summary="What this is, and where to look", response_model=IndexResponse)
async def show_index(request: Request, service: ServiceDep) -> Response:
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


@router.get_and_head(
    "/stats",
    summary="What was done since the start",
    response_model=StatsResponse,
)
async def show_stats(service: ServiceDep) -> Response:
    """Totals since the start; they are read from the Prometheus counters."""
    hardware = describe_gpu(service)
    return JSONResponse(totals(service.metrics) | {"hardware": hardware})


@router.get_and_head(
    "/metrics",
    summary="Prometheus metrics",
    response_class=PlainTextResponse,
)
async def show_metrics(service: ServiceDep) -> Response:
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
    """The labels of embedding_server_info: the lengths in force, `none` where no model has one."""
    kinds = ("bge_embed", "qwen_embed", "bge_rerank", "qwen_rerank")
    lengths: dict[str, int | str] = dict.fromkeys((f"{kind}_max_length" for kind in kinds), "none")
    lengths["bge_embed_max_length"] = models.embedder.max_length
    if models.dense is not None:
        lengths["qwen_embed_max_length"] = models.dense.max_length
    if models.late_interaction:
        lengths["bge_rerank_max_length"] = models.embedder.max_length
    elif models.reranker is not None:
        kind = "bge" if models.reranker.scores_are_logits else "qwen"
        lengths[f"{kind}_rerank_max_length"] = models.reranker.max_length
    return {
        "model": public_name(settings.embedding_model),
        "dense_embedding_model": public_name(settings.dense_model),
        "reranker_model": public_name(settings.reranker_model),
        **{name: str(length) for name, length in lengths.items()},
        "version": __version__,
        "gpu_available": str(models.device.gpu_available).lower(),
        "device": models.device.name,
    }
