"""The service as a process: from settings to an exit status."""

import logging
import os
import signal
import sys
import threading
from contextlib import suppress

import structlog
import uvicorn

from app.api.service import Service
from app.connections import bounded_connection
from app.engine.loading import LoadedModels, Loader, load_models
from app.errors import StartupError
from app.garbage import collect_rarely, spare_what_stays
from app.logs import configure_logs
from app.main import create_app
from app.ports import require_port
from app.server import DrainingServer
from app.settings import Settings, load_settings

log = structlog.get_logger(__name__)


def run(loader: Loader = load_models) -> None:
    """Serve until SIGTERM or SIGINT; the exit status tells whether the start succeeded."""
    # Until the server has its own handlers: as PID 1 a process without any cannot be stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    collect_rarely()
    # Read by the hub's library, which is imported later.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    try:
        settings = load_settings()
        configure_logs(settings.log_format, settings.log_level)
        require_port(settings.host, settings.port)
        status = serve(settings, loader)
    except StartupError as error:
        sys.exit(f"Smart Embedder cannot start: {error}")
    except KeyboardInterrupt:
        sys.exit(0)
    _exit(status)


def serve(settings: Settings, loader: Loader) -> int:
    """Run the service; 0 after an orderly end, 1 where the models could not be loaded."""
    failures: list[Exception] = []

    def on_ready(models: LoadedModels) -> None:
        spare_what_stays()
        _announce(server, models)

    def on_failure(error: Exception) -> None:
        failures.append(error)
        _report_failure(error)
        server.should_exit = True

    app = create_app(settings, loader=loader, on_ready=on_ready, on_failure=on_failure)
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=bounded_connection(settings.request_timeout, service.drain),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    server = DrainingServer(
        config, service.drain, settings.shutdown_timeout, abort=service.engine.abort
    )
    server.run()
    return 1 if failures or not server.started else 0


def _exit(status: int) -> None:
    """End the process, whether or not every thread can be waited for."""
    if threading.active_count() == 1:
        sys.exit(status)
    # A device that never comes back, or a model that is still being loaded, must not hold it.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def _report_failure(error: Exception) -> None:
    if isinstance(error, StartupError):
        log.error("start_failed", reason=str(error))
        return
    first_line = str(error).partition("\n")[0]
    reason = f"unexpected error while loading: {type(error).__name__}: {first_line}"
    log.error("start_failed", reason=reason, exc_info=error)


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
