"""GET /stats: totals since the start, from the Prometheus counters."""

import time
from typing import Any

from starlette.responses import JSONResponse, Response

from app.http_metrics import Metrics
from app.response_schemas import StatsResponse
from app.routing import Router
from app.service import ServiceDep, describe_gpu

router = Router(tags=["operation"], is_public=True)


@router.get_and_head("/stats", summary="Totals since the start", response_model=StatsResponse)
async def show_stats(service: ServiceDep) -> Response:
    """Return totals since the start, read from the Prometheus counters."""
    hardware = describe_gpu(service)
    return JSONResponse(sum_totals(service.metrics) | {"hardware": hardware})


def sum_totals(metrics: Metrics) -> dict[str, Any]:
    """Compute the totals of /stats."""
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
