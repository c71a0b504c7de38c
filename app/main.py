"""Creates the ASGI app; `uvicorn app.main:app` serves it, too."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.middleware import Middleware

from app.body import max_json_values
from app.catalogue import ModelCatalogue
from app.context import NATIVE
from app.dialects import cohere, embedding_server, ollama, openai, sie, tei
from app.error_responses import install_error_handlers
from app.http_metrics import Metrics, describe_server, measure_lateness
from app.logs import flush_each_line
from app.middleware.auth import ApiTokens, RequireTokenAndLimitRate
from app.middleware.draining import Drain, RefuseWhileDraining
from app.middleware.limits import BODY_SECONDS, LimitBody, LimitMemory, MemoryBudget
from app.middleware.origin import CheckOrigin
from app.middleware.rate_limit import TokenBuckets
from app.middleware.request_log import LogRequests, ProvideContext
from app.middleware.request_metrics import MeasureRequests
from app.openapi import install_openapi
from app.routers import embeddings, extract, health, metrics, models, pages, rerank, stats
from app.routers.pages import install_docs, install_ui
from app.routing import Paths
from app.run import (
    freeze_startup_objects,
    load_settings_and_configure_logs,
    log_failure,
    log_memory,
    log_ready,
    stop_uvicorn,
)
from app.service import Service
from app.settings import Settings
from app.token_ids import TokenTable
from smart_embedder import __version__
from smart_embedder.core import EngineCore
from smart_embedder.errors import StartupError
from smart_embedder.interface import DownloadStatus, LoadedModels, Loader
from smart_embedder.startup import load_models

# FastAPI searches the routes in this order: the busiest come first.
ROUTERS = (
    embeddings.router,
    rerank.router,
    rerank.documents_router,
    openai.router,
    cohere.router,
    tei.router,
    tei.model_router,
    extract.router,
    sie.router,
    embedding_server.router,
    ollama.router,
    models.router,
    tei.health_router,
    health.router,
    pages.router,
    stats.router,
    metrics.router,
)
_RENDER_THREADS = 2
# FastAPI's telemetry would ignore the settings and send error messages.
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
    try:
        app = create_app(
            load_settings_and_configure_logs(),
            on_settled=freeze_startup_objects,
            on_failure=stop_uvicorn,
        )
    except StartupError as error:  # uvicorn would print a traceback.
        sys.exit(f"Smart Embedder cannot start: {error}")
    globals()["app"] = app
    return app


def create_app(
    settings: Settings,
    *,
    loader: Loader | None = None,
    drain: Drain | None = None,
    on_ready: Callable[[LoadedModels], None] = log_ready,
    on_settled: Callable[[], None] = lambda: None,
    on_failure: Callable[[Exception], None] = log_failure,
) -> FastAPI:
    """Create the service as an ASGI app; its lifespan loads the models in the background.

    `loader` replaces `load_models`. `on_ready` is called once the models are loaded, `on_settled`
    when all other work of the start is done, and `on_failure` if the models cannot be loaded.
    """
    service = _create_service(settings, loader, drain or Drain())
    budget = MemoryBudget.for_bodies_of(settings.max_body_bytes)
    paths = Paths(ROUTERS)
    middleware = _create_middleware(service, budget, paths)
    close_traces = _add_traces(middleware, settings)

    async def start(app: FastAPI) -> None:
        await service.engine.start()
        models = service.engine.loaded()
        if models.device.host_memory_left is not None:
            left = models.device.host_memory_left()
            budget.shrink_to(left)
            log_memory(settings, budget.bodies.max_per_client, budget.max_per_client, left)
        if models.device.read_memory is not None:
            service.metrics.watch_memory(models.read_memory)
        service.metrics.server.info(describe_server(settings, models))
        on_ready(models)
        # Takes a third of a second. Done earlier, it would delay the loading of the models; done
        # later, the first request for /docs would wait for it.
        await asyncio.to_thread(app.openapi)
        on_settled()

    def report_failure(starting: "asyncio.Task[None]") -> None:
        error = None if starting.cancelled() else starting.exception()
        if isinstance(error, Exception):
            on_failure(error)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # In the background, so that the service answers while the models are being loaded.
        starting = asyncio.create_task(start(app), name="start")
        lateness = asyncio.create_task(measure_lateness(service.metrics.lateness), name="lateness")
        starting.add_done_callback(report_failure)
        try:
            yield
        finally:
            for task in (starting, lateness):
                task.cancel()
            await asyncio.wait({starting, lateness})
            # The drain is over, so no client waits for the work that is left on the device.
            service.engine.abort()
            await service.engine.close()
            await asyncio.to_thread(close_traces)
            service.render_threads.shutdown(wait=False, cancel_futures=True)
            # uvicorn's command ends the process by the signal that it received.
            flush_each_line()

    # /docs lists the operations of this service's own API first.
    routers = sorted(ROUTERS, key=lambda router: router.dialect is not NATIVE)
    app = FastAPI(
        # With `include_router`, each request would search a router twice.
        routes=[route for router in ROUTERS for route in router.routes],
        title="Smart Embedder",
        version=__version__,
        openapi_tags=[dict(tag) for router in routers for tag in router.groups],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
        lifespan=lifespan,
        middleware=middleware,
    )
    app.state.service = service
    native = [router for router in ROUTERS if router.dialect is NATIVE]
    install_docs(app, [tag["name"] for router in native for tag in router.groups])
    if settings.ui:
        install_ui(app)
    install_openapi(app, service, paths)
    install_error_handlers(app)
    return app


def _create_service(settings: Settings, loader: Loader | None, drain: Drain) -> Service:
    metrics, downloads = Metrics(), DownloadStatus()
    engine = EngineCore(
        settings,
        loader or partial(load_models, status=downloads),
        metrics,
        request_timeout=settings.request_timeout,
        shutdown_timeout=settings.shutdown_timeout,
    )
    token_table = None
    if settings.token_ids is not None:
        folder, max_bytes = settings.tiktoken_cache_dir, settings.max_body_bytes
        token_table = TokenTable.load(settings.token_ids, folder, max_bytes)
    metrics.watch(engine, settings)
    drain.time_out = engine.abort
    return Service(
        settings=settings,
        catalogue=ModelCatalogue(settings),
        metrics=metrics,
        engine=engine,
        downloads=downloads,
        drain=drain,
        buckets=TokenBuckets(
            settings.rate_limit_requests_per_minute, settings.rate_limit_burst_size
        ),
        render_threads=ThreadPoolExecutor(_RENDER_THREADS, thread_name_prefix="render"),
        body_lock=asyncio.Lock(),
        max_json_values=max_json_values(settings),
        token_table=token_table,
    )


def _create_middleware(service: Service, budget: MemoryBudget, paths: Paths) -> list[Middleware]:
    """Create the middleware, from the outermost to the innermost."""
    settings = service.settings
    api_token = settings.api_token.get_secret_value() if settings.api_token else None
    tokens = ApiTokens(api_token, settings.api_tokens_file)
    for name in tokens.names:
        service.metrics.client(name)
    service.metrics.tokens_file_unreadable.set_function(lambda: float(tokens.is_unreadable))
    return [
        Middleware(ProvideContext, settings.trusted_proxies or (), paths.find),
        Middleware(LogRequests),
        Middleware(MeasureRequests, service.metrics, paths.endpoints),
        Middleware(CheckOrigin, allowed=settings.cors_origins or ()),
        Middleware(RefuseWhileDraining, drain=service.drain),
        Middleware(
            RequireTokenAndLimitRate,
            tokens,
            service.buckets,
            requests_per_minute=settings.rate_limit_requests_per_minute,
            burst=settings.rate_limit_burst_size,
            protect_metrics=settings.protect_metrics,
        ),
        Middleware(LimitBody, max_bytes=settings.max_body_bytes),
        Middleware(
            LimitMemory,
            budget=budget,
            body_seconds=min(BODY_SECONDS, settings.request_timeout / 3),
        ),
    ]


def _add_traces(middleware: list[Middleware], settings: Settings) -> Callable[[], None]:
    """Trace requests if OTLP_ENDPOINT is set; return the function that sends the last spans."""
    if settings.otlp_endpoint is None:
        return lambda: None
    # This module imports OpenTelemetry's SDK and exporter.
    from app.middleware.tracing import TraceRequests, Traces  # noqa: PLC0415

    traces = Traces(settings.otlp_endpoint)
    # Inside of `ProvideContext`, whose context it reads, and of `LogRequests`.
    middleware.insert(2, Middleware(TraceRequests, traces.tracer))
    return traces.close
