"""Wires the parts together, and runs them under uvicorn."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import structlog
import uvicorn
from fastapi import FastAPI

from app import __version__
from app.api import embeddings, health, operations, rerank
from app.api.docs import install_docs
from app.api.errors import install_error_handlers
from app.api.service import Service
from app.connections import bounded_connection
from app.engine import Engine
from app.engine.loading import LoadedModels, Loader, load_models
from app.errors import StartupError
from app.logs import configure_logs
from app.metrics import Metrics
from app.middleware.auth import RequireToken
from app.middleware.body_limit import LimitBody
from app.middleware.context import RequestContext
from app.middleware.memory_limit import LimitMemory
from app.middleware.observe import ObserveRequests
from app.settings import Settings, load_settings
from app.tokens import Tokens

log = structlog.get_logger(__name__)

OnReady = Callable[[LoadedModels], None]
OnFailure = Callable[[Exception], None]

_RENDER_THREADS = 2
_BODIES_IN_MEMORY = 16


def create_app(
    settings: Settings,
    *,
    loader: Loader = load_models,
    on_ready: OnReady = lambda _: None,
    on_failure: OnFailure = lambda _: None,
) -> FastAPI:
    """The whole service as an ASGI app; its lifespan loads the models in the background."""
    metrics = Metrics()
    service = Service(
        settings=settings,
        metrics=metrics,
        engine=Engine(settings, metrics, loader),
        render_threads=ThreadPoolExecutor(_RENDER_THREADS, thread_name_prefix="render"),
    )
    app = FastAPI(
        title="Smart Embedder",
        version=__version__,
        description="Dense, sparse and ColBERT vectors for hybrid search, on your own hardware.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan(service, on_ready, on_failure),
    )
    app.state.service = service
    for module in (embeddings, rerank, health, operations):
        app.include_router(module.router)
    install_docs(app)
    install_error_handlers(app)
    # The last one added is the outermost.
    app.add_middleware(LimitMemory, max_bytes=_BODIES_IN_MEMORY * settings.max_body_bytes)
    app.add_middleware(LimitBody, max_bytes=settings.max_body_bytes)
    app.add_middleware(
        RequireToken, tokens=_tokens(settings), protect_metrics=settings.protect_metrics
    )
    app.add_middleware(ObserveRequests, metrics=metrics)
    app.add_middleware(RequestContext)
    return app


def _tokens(settings: Settings) -> Tokens:
    own = settings.api_token
    return Tokens(own.get_secret_value() if own else None, settings.api_tokens_file)


def _lifespan(
    service: Service, on_ready: OnReady, on_failure: OnFailure
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # In the background, so that the port answers while the models are being loaded.
        start = asyncio.create_task(_start(service, on_ready, on_failure), name="engine-start")
        try:
            yield
        finally:
            start.cancel()
            with suppress(asyncio.CancelledError):
                await start
            await service.engine.close()
            service.render_threads.shutdown(wait=False, cancel_futures=True)

    return lifespan


async def _start(service: Service, on_ready: OnReady, on_failure: OnFailure) -> None:
    try:
        await service.engine.start()
    except Exception as error:  # noqa: BLE001 - whatever it was, there is no service
        on_failure(error)
        return
    models = service.engine.models
    assert models is not None  # noqa: S101 - start has returned
    service.metrics.describe(_facts(service.settings, models))
    on_ready(models)


def _facts(settings: Settings, models: LoadedModels) -> dict[str, str]:
    return {
        "model": settings.embedding_model,
        "dense_embedding_model": settings.dense_model,
        "reranker_model": settings.reranker_model,
        "bge_embed_max_length": str(models.embedder.max_length),
        "qwen_embed_max_length": str(settings.qwen_embed_max_length),
        "bge_rerank_max_length": str(settings.bge_rerank_max_length),
        "qwen_rerank_max_length": str(settings.qwen_rerank_max_length),
        "version": __version__,
        "gpu_available": str(models.device.gpu_available).lower(),
        "device": models.device.name,
    }


def run() -> None:
    """Serve until SIGTERM or SIGINT; the exit status tells whether the start succeeded."""
    # Read by the hub's library, which is imported later.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    try:
        settings = load_settings()
        configure_logs(settings.log_format, settings.log_level)
        status = serve(settings)
    except StartupError as error:
        sys.exit(f"Smart Embedder cannot start: {error}")
    sys.exit(status)


def serve(settings: Settings) -> int:
    """Run the service; 0 after an orderly end, 1 where the models could not be loaded."""
    failures: list[Exception] = []

    def on_ready(models: LoadedModels) -> None:
        _spare_what_stays()
        _announce(server, models)

    def on_failure(error: Exception) -> None:
        failures.append(error)
        _report_failure(error)
        server.should_exit = True

    app = create_app(settings, on_ready=on_ready, on_failure=on_failure)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=bounded_connection(settings.request_timeout),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(settings.shutdown_timeout),
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal once more after an orderly end; the exit status must not tell of it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with suppress(KeyboardInterrupt):
        server.run()
    return 1 if failures or not server.started else 0


def _spare_what_stays() -> None:
    """Let the garbage collector pass over models and libraries from now on.

    They are 400,000 objects and more, and looking at all of them stopped every thread for 0.3
    seconds, /health included, whenever a full collection fell due.
    """
    gc.collect()
    gc.freeze()


def _report_failure(error: Exception) -> None:
    if isinstance(error, StartupError):
        log.error("start_failed", reason=str(error))
    else:
        log.error("start_failed", reason="unexpected error while loading", exc_info=error)


def _announce(server: uvicorn.Server, models: LoadedModels) -> None:
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"  # noqa: S104
    log.info(
        "ready",
        url=url,
        model=models.embedder.name,
        device=models.device.description,
        dtype=models.device.dtype,
        attention=models.device.attention,
        max_batch_tokens=models.max_batch_tokens,
    )
    if models.demo:
        log.warning("demo_model", note=models.demo)
    with suppress(OSError):  # Nobody may be there to read it, or no room on the disk.
        print(_banner(url), flush=True)


def _banner(url: str) -> str:
    return f"""
Smart Embedder is ready at {url} (documentation: {url}/docs). Try:

  curl -s {url}/embeddings/ -H 'Content-Type: application/json' \\
    -d '{{"sentences": ["What is hybrid search?"], "return_colbert": false}}'
"""
