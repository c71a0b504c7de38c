"""GET /health, /health/ready and /health/live."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from app import __version__
from app.api.handler import Service, ServiceDep, get_and_head
from app.api.operation_schemas import HealthResponse, LivenessResponse
from app.engine.download import Download
from app.engine.loaded_models import LoadedModels
from app.settings import Settings
from app.settings.model_names import public_name

router = APIRouter(tags=["operation"])

Responses = dict[int | str, dict[str, Any]]

_HEALTH: Responses = {status: {"model": HealthResponse} for status in (200, 503)}
_LIVENESS: Responses = {status: {"model": LivenessResponse} for status in (200, 503)}


@get_and_head(router, "/health", summary="Can this service answer?", responses=_HEALTH)
@get_and_head(router, "/health/ready", summary="The same, for orchestrators", responses=_HEALTH)
async def health(service: ServiceDep) -> Response:
    """200 once the models are warm; 503 with a reason while loading, draining or unhealthy."""
    download = service.downloads.current
    status, reason = service.status
    if status == "loading" and download is not None:
        reason = str(download)
    body = {
        "status": status,
        "reason": reason,
        "download": describe_download(download),
        "version": __version__,
    }
    return JSONResponse(body | describe(service), 200 if status == "healthy" else 503)


@get_and_head(router, "/health/live", summary="Is a restart needed?", responses=_LIVENESS)
async def live(service: ServiceDep) -> Response:
    """200 unless the process should be restarted."""
    failure = service.engine.failure
    if failure is None:
        return JSONResponse({"status": "alive"})
    return JSONResponse({"status": "unhealthy", "reason": str(failure)}, 503)


def describe_download(download: Download | None) -> dict[str, Any] | None:
    """The `download` object of /health."""
    return None if download is None else asdict(download) | {"percent": download.percent}


def describe(service: Service) -> dict[str, Any]:
    """Models, limits and hardware; null where they are not known yet."""
    settings, models = service.settings, service.engine.models
    return {
        "gpu": describe_gpu(service),
        "model": public_name(settings.embedding_model),
        "dense_embedding_model": public_name(settings.dense_model),
        "reranker_model": public_name(settings.reranker_model),
        "models": [] if models is None else [asdict(info) for info in models.infos],
        "served_models": [
            asdict(status) | {"state": status.state.value} for status in service.engine.statuses
        ],
        "demo": None if models is None else models.demo,
    } | describe_limits(models, settings)


def describe_gpu(service: Service) -> dict[str, Any]:
    """The `gpu` object of /health."""
    settings, models = service.settings, service.engine.models
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


def describe_limits(models: LoadedModels | None, settings: Settings) -> dict[str, Any]:
    """Lengths, budgets and formats in force; null where they are known only after loading."""
    if models is None:
        unknown = ("batch_size", "max_batch_tokens", "dtype", "attention")
        limits: dict[str, Any] = {
            "max_input_length": settings.embed_max_length,
            "max_requests_in_batch": settings.max_requests_in_batch,
        }
        return limits | dict.fromkeys(unknown)
    length = models.embedder.max_length
    return {
        "max_input_length": length,
        "batch_size": max(1, models.max_batch_tokens // length),
        "max_requests_in_batch": settings.max_requests_in_batch,
        "max_batch_tokens": models.max_batch_tokens,
        "dtype": models.device.dtype,
        "attention": models.device.attention,
    }
