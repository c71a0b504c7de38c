"""The parts of one running service."""

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from app.catalogue import ModelCatalogue, ServedModel
from app.http_metrics import Metrics
from app.middleware.draining import Drain
from app.middleware.rate_limit import TokenBuckets
from app.settings import Settings
from app.token_ids import TokenTable
from smart_embedder.core import EngineCore
from smart_embedder.interface import DownloadStatus, LoadedModels, ModelStatus


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of one running service.

    `body_lock` is held while a large body is parsed. `max_json_values` limits the values in a body.
    `token_table` is the table of TOKEN_IDS.
    """

    settings: Settings
    catalogue: ModelCatalogue
    metrics: Metrics
    engine: EngineCore
    downloads: DownloadStatus
    drain: Drain
    buckets: TokenBuckets
    render_threads: Executor
    body_lock: asyncio.Lock
    max_json_values: int
    token_table: TokenTable | None

    @property
    def models(self) -> LoadedModels | None:
        """The default models, once they are loaded."""
        return self.engine.loaded() if self.engine.is_ready else None

    def status_of(self, model: ServedModel) -> ModelStatus:
        """The state of a model. An embedder and a reranker may have the same name."""
        key = model.name, model.role.task
        return next(status for status in self.engine.statuses if (status.name, status.task) == key)

    @property
    def status(self) -> tuple[str, str | None]:
        """`status` and `reason` of /health."""
        failure = self.engine.failure
        if failure is not None:
            return "unhealthy", str(failure)
        if self.drain.announced or self.engine.closing:
            return "draining", "the service is shutting down"
        if not self.engine.is_ready:
            return "loading", "the models are being loaded"
        return "healthy", None


async def get_service(request: Request) -> Service:
    """The service of the app that serves this request."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


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
        "configured_devices": [used.name for used in models.devices]
        if models
        else settings.devices,
        "failed_devices": service.engine.failed_devices,
    }
