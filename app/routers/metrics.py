"""GET /metrics: all metrics in Prometheus' text format."""

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from app.routing import Router
from app.service import ServiceDep

router = Router(tags=["operation"], is_public=True)


@router.get_and_head("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def show_metrics(service: ServiceDep) -> Response:
    """Return all metrics in Prometheus' text format."""
    # In a thread: rendering takes milliseconds.
    rendered = await asyncio.to_thread(service.metrics.render)
    return Response(rendered, media_type=CONTENT_TYPE_LATEST)
