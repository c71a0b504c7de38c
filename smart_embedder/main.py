"""Builds the ASGI app from its parts; `uvicorn app.main:app` serves it, too."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from fastapi.telemetry import TelemetryConfig
from starlette.middleware import Middleware

from smart_embedder import __version__
from smart_embedder.access.rate_limit import Buckets, MemoryBuckets, SharedBuckets
from smart_embedder.access.tokens import ApiTokens
from smart_embedder.api.body import max_json_values
from smart_embedder.api.catalogue import ModelCatalogue
from smart_embedder.api.context import NATIVE
from smart_embedder.api.dialects import cohere, embedding_server, openai, tei, vllm
from smart_embedder.api.endpoints import native, operations
from smart_embedder.api.endpoints.pages import install_docs, install_ui
from smart_embedder.api.errors import install_error_handlers
from smart_embedder.api.handler import Service
from smart_embedder.api.openapi import install_openapi, paths_of
from smart_embedder.engine import Engine
from smart_embedder.engine.model import DownloadStatus, LoadedModels, Loader
from smart_embedder.engine.scheduling.fairness import FairSemaphore, LoopTurns
from smart_embedder.middleware.access import (
    CheckOrigin,
    LimitRate,
    RateLimiter,
    RefuseWhileDraining,
    RequireToken,
)
from smart_embedder.middleware.body import LimitBody, UnpackBody
from smart_embedder.middleware.memory import BODY_SECONDS, LimitMemory
from smart_embedder.middleware.observe import (
    LogRequests,
    MeasureRequests,
    ProvideContext,
    TraceRequests,
)
from smart_embedder.models.load import load_models
from smart_embedder.observability.loop_watch import LoopWatch, WatchRequests
from smart_embedder.observability.metrics import Metrics
from smart_embedder.observability.tracing import Tracer
from smart_embedder.server.drain import Drain
from smart_embedder.server.process import (
    exit_on_startup_error,
    freeze_startup_objects,
    load_settings_and_configure_logs,
    log_failure,
    log_ready,
    stop_uvicorn,
)
from smart_embedder.settings import Settings

OnReady = Callable[[LoadedModels], None]
OnFailure = Callable[[Exception], None]

# The order of the paths in the description.
ROUTERS = (
    native.router,
    cohere.rerank_router,
    openai.router,
    cohere.router,
    vllm.router,
    tei.router,
    embedding_server.router,
    operations.router,
)
_RENDER_THREADS = 2
_BODIES_IN_MEMORY = 16
_ANSWERS_IN_MEMORY = 4
# FastAPI's own telemetry ignores the settings, and sends the messages of errors.
_NO_TELEMETRY: TelemetryConfig = {
    "auto_configure": False,
    "tracing": False,
    "metrics": False,
    "logs": False,
}


def __getattr__(name: str) -> FastAPI:
    """Create `app` when an ASGI server such as uvicorn first asks for it."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with exit_on_startup_error():
        app = create_app(
            load_settings_and_configure_logs(),
            on_settled=freeze_startup_objects,
            on_failure=stop_uvicorn,
        )
    globals()["app"] = app
    return app


def create_app(
    settings: Settings,
    *,
    loader: Loader | None = None,
    drain: Drain | None = None,
    on_ready: OnReady = log_ready,
    on_settled: Callable[[], None] = lambda: None,
    on_failure: OnFailure = log_failure,
) -> FastAPI:
    """Create the service as an ASGI app; its lifespan loads the models in the background.

    `loader` replaces `load_models`. `on_settled` is called soon after `on_ready`, when nothing is
    left to do that only the start does.
    """
    service = _create_service(settings, loader, drain or Drain())
    watch = LoopWatch(service.metrics.loop_blocked.observe)
    app = FastAPI(
        title="Smart Embedder",
        version=__version__,
        openapi_tags=_tags(),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
        lifespan=_lifespan(service, watch, on_ready, on_settled, on_failure),
        middleware=[Middleware(WatchRequests, watch=watch), *_middleware(service)],
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    install_docs(app)
    if settings.ui:
        install_ui(app)
    install_openapi(app, service)
    install_error_handlers(app)
    # Or the first request would do it, on the event loop, for all routes before its own.
    deque(iter_route_contexts(app.routes), maxlen=0)
    return app


def _tags() -> list[dict[str, Any]]:
    """The groups of operations in /docs: this service's own first."""
    routers = sorted(ROUTERS, key=lambda each: each.dialect is not NATIVE)
    return [dict(tag) for router in routers for tag in router.groups]


def _create_service(settings: Settings, loader: Loader | None, drain: Drain) -> Service:
    metrics, downloads = Metrics(), DownloadStatus()
    engine = Engine(settings, loader or partial(load_models, status=downloads), metrics)
    drain.on_timeout(engine.abort)
    return Service(
        settings=settings,
        catalogue=ModelCatalogue(settings),
        metrics=metrics,
        engine=engine,
        downloads=downloads,
        drain=drain,
        buckets=_buckets(settings, metrics),
        tracer=_tracer(settings),
        render_threads=ThreadPoolExecutor(_RENDER_THREADS, thread_name_prefix="render"),
        stream_slots=FairSemaphore(max(1, settings.max_queue_size // 2)),
        turns=LoopTurns(),
        max_json_values=max_json_values(settings),
    )


def _middleware(service: Service) -> list[Middleware]:
    """What every request passes but the watch, from the outermost to the innermost."""
    settings = service.settings
    limiter = RateLimiter(
        service.buckets, settings.rate_limit_requests_per_minute, settings.rate_limit_burst_size
    )
    bodies_bytes = _BODIES_IN_MEMORY * settings.max_body_bytes
    paths = paths_of(ROUTERS)
    tokens, protect_metrics = _tokens(settings), settings.protect_metrics
    tracing = [] if service.tracer is None else [Middleware(TraceRequests, tracer=service.tracer)]
    return [
        Middleware(ProvideContext, settings.trusted_proxies or (), paths),
        Middleware(LogRequests),
        *tracing,
        Middleware(MeasureRequests, service.metrics, paths.endpoints),
        Middleware(CheckOrigin, allowed=settings.cors_origins or ()),
        Middleware(RefuseWhileDraining, drain=service.drain),
        Middleware(RequireToken, tokens, limiter, protect_metrics=protect_metrics),
        Middleware(LimitRate, limiter=limiter),
        Middleware(LimitBody, max_bytes=settings.max_body_bytes),
        Middleware(UnpackBody, max_bytes=settings.max_body_bytes, turns=service.turns),
        # Inside `UnpackBody`, so that it counts what is unpacked.
        Middleware(
            LimitMemory,
            max_bytes=bodies_bytes,
            answer_bytes=settings.max_answer_bytes,
            max_answers_bytes=max(bodies_bytes, _ANSWERS_IN_MEMORY * settings.max_answer_bytes),
            body_seconds=min(BODY_SECONDS, settings.request_timeout / 3),
            stream_seconds=settings.request_timeout,
            turns=service.turns,
        ),
    ]


def _buckets(settings: Settings, metrics: Metrics) -> Buckets:
    rate, burst = settings.rate_limit_requests_per_minute, settings.rate_limit_burst_size
    address = settings.shared_rate_limit_store
    if address is None:
        return MemoryBuckets(rate, burst)
    return SharedBuckets(address, rate, burst, on_error=metrics.rate_limit_store_errors.inc)


def _tracer(settings: Settings) -> Tracer | None:
    if settings.otlp_endpoint is None:
        return None
    # Imports OpenTelemetry's SDK and exporter, only if traces are sent.
    from smart_embedder.observability.otlp import OtlpTracer  # noqa: PLC0415

    return OtlpTracer(settings.otlp_endpoint, settings.otel_service_name)


def _tokens(settings: Settings) -> ApiTokens:
    own = settings.api_token
    return ApiTokens(own.get_secret_value() if own else None, settings.api_tokens_file)


def _lifespan(
    service: Service,
    watch: LoopWatch,
    on_ready: OnReady,
    on_settled: Callable[[], None],
    on_failure: OnFailure,
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # In the background, so that the port answers while the models are being loaded.
        work = _start(app, service, watch, on_ready, on_settled)
        start = asyncio.create_task(work, name="start")
        start.add_done_callback(partial(_report_failure, on_failure))
        try:
            yield
        finally:
            start.cancel()
            await asyncio.wait({start})
            # The drain is over: no client waits for the work that is left on the device.
            service.engine.abort()
            await service.engine.close()
            await service.buckets.close()
            if service.tracer is not None:
                await asyncio.to_thread(service.tracer.close)
            service.render_threads.shutdown(wait=False, cancel_futures=True)
            await watch.close()

    return lifespan


async def _start(
    app: FastAPI,
    service: Service,
    watch: LoopWatch,
    on_ready: OnReady,
    on_settled: Callable[[], None],
) -> None:
    await service.engine.start()
    models = service.engine.loaded()
    assert models is not None  # noqa: S101 - start has returned
    service.metrics.server.info(operations.describe_server(service.settings, models))
    on_ready(models)
    # Not before, as imports of large libraries hold Python's lock for long.
    watch.start()
    # A third of a second of Python, for which the first /docs would wait. It would take that time
    # from the start, which is mostly imports.
    await asyncio.to_thread(app.openapi)
    on_settled()


def _report_failure(on_failure: OnFailure, start: "asyncio.Task[None]") -> None:
    error = None if start.cancelled() else start.exception()
    if isinstance(error, Exception):
        on_failure(error)
