"""GET /health: the state of the service, its models, limits and hardware."""

from dataclasses import asdict
from typing import Any

from starlette.responses import JSONResponse, Response

from app.response_schemas import HealthResponse, LivenessResponse
from app.routing import Router
from app.service import Service, ServiceDep, describe_gpu
from smart_embedder import __version__
from smart_embedder.settings import public_name

_TAG = {"name": "operation", "description": "Health, totals and metrics."}

router = Router(groups=[_TAG], tags=[_TAG["name"]], is_public=True)

Responses = dict[int | str, dict[str, Any]]

_HEALTH: Responses = {status: {"model": HealthResponse} for status in (200, 503)}
_LIVENESS: Responses = {status: {"model": LivenessResponse} for status in (200, 503)}


@router.get_and_head(
    "/health/ready", name="check_ready", summary="Is the service ready?", responses=_HEALTH
)
@router.get_and_head("/health", summary="Can this service answer?", responses=_HEALTH)
async def check_health(service: ServiceDep) -> Response:
    """Return 200 once the models are warm; 503 with a reason while loading, draining or unhealthy.

    /health/ready is the same, under the name that orchestrators expect.
    """
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


@router.get_and_head("/health/live", summary="Is the process alive?", responses=_LIVENESS)
async def check_live(service: ServiceDep) -> Response:
    """Return 200 unless the process should be restarted."""
    failure = service.engine.failure
    if failure is None:
        return JSONResponse({"status": "alive"})
    return JSONResponse({"status": "unhealthy", "reason": str(failure)}, 503)


def describe(service: Service) -> dict[str, Any]:
    """Describe models, limits and hardware; null for values that are not known yet."""
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
