"""An example: the service on Ray Serve, from a checkout on every machine.

    serve run deploy.ray.serve:app

Each replica is the whole app with one engine; Ray's proxy forwards requests to the replicas. Change
the numbers and the settings below, or in the file that `serve build deploy.ray.serve:app` writes.
"""

import asyncio
from functools import partial

from fastapi import FastAPI
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.main import create_app
from app.run import load_settings_and_configure_logs, log_failure, log_ready
from smart_embedder.core import EngineCore
from smart_embedder.interface import LoadedModels

# Any setting of the service. DTYPE is one number format for all machines.
SETTINGS = {"LOG_FORMAT": "json", "DTYPE": "float32"}


class ReadyOnceLoaded:
    """Delays the app's startup until its models are loaded, so that Ray sends no requests before.

    If the start fails, Ray gets the reason.
    """

    def __init__(self) -> None:
        self._failure: Exception | None = None
        self._loaded = asyncio.Event()
        self._app: FastAPI = create_app(
            load_settings_and_configure_logs(), on_ready=self._succeed, on_failure=self._fail
        )

    @property
    def engine(self) -> EngineCore:
        """The engine behind the app."""
        engine: EngineCore = self._app.state.service.engine
        return engine

    def _succeed(self, models: LoadedModels) -> None:
        log_ready(models)
        self._loaded.set()

    def _fail(self, error: Exception) -> None:
        log_failure(error)
        self._failure = error
        self._loaded.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything to the app, and delay the end of its startup."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, partial(_send_without_request_id, send))
            return

        async def send_once_loaded(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._loaded.wait()
                if self._failure is not None:
                    message = {"type": "lifespan.startup.failed", "message": str(self._failure)}
            await send(message)

        await self._app(scope, receive, send_once_loaded)


async def _send_without_request_id(send: Send, message: Message) -> None:
    """Remove the header X-Request-ID, which Ray's proxy adds with the same value."""
    if message["type"] == "http.response.start":
        headers = [
            (name, value) for name, value in message["headers"] if name.lower() != b"x-request-id"
        ]
        message = {**message, "headers": headers}
    await send(message)


def build() -> ASGIApp:
    """Create the app in the replica."""
    return ReadyOnceLoaded()


@serve.deployment(
    ray_actor_options={"num_cpus": 2, "runtime_env": {"env_vars": SETTINGS}},
    # A high limit: requests wait in the replica's own queue, which is fair between clients.
    max_ongoing_requests=256,
    max_queued_requests=1024,
    autoscaling_config={"min_replicas": 2, "max_replicas": 4, "target_ongoing_requests": 16},
    health_check_period_s=5,
    health_check_timeout_s=15,
    # Longer than REQUEST_TIMEOUT, so that a replica answers all accepted requests.
    graceful_shutdown_wait_loop_s=1,
    graceful_shutdown_timeout_s=100,
)
@serve.ingress(build)
class SmartEmbedder:
    """One replica: the app with its engine."""

    app: ReadyOnceLoaded

    async def check_health(self) -> None:
        """Raise a failure of the engine that needs a restart."""
        failure = self.app.engine.failure
        if failure is not None:
            raise failure


app = SmartEmbedder.bind()  # type: ignore[attr-defined]
