"""The service with models that a test can unload: `python -m tests.app.ui.unloading_server`.

POST /test/unload/{model} unloads a model without an operator's token. While the file HOLD_LOADING
exists, none is loaded.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from app.main import create_app
from app.run import run
from app.settings import Settings
from smart_embedder.interface import DefaultModels, LoadPlan, ModelLoader
from smart_embedder.settings import ModelEntry
from smart_embedder.startup import load_models
from tests.support.waiting import wait_until


class HeldLoader:
    """The real loader, behind a gate."""

    def __init__(self, loader: ModelLoader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def plan(self, entry: ModelEntry) -> LoadPlan:
        wait_until(lambda: not Path(os.environ["HOLD_LOADING"]).exists(), "never let go")
        return self._loader.plan(entry)


def _load(settings: Settings) -> DefaultModels:
    models = load_models(settings)
    return replace(models, loader=HeldLoader(models.loader))


def _create(settings: Settings, **options: Any) -> FastAPI:
    app = create_app(settings, loader=_load, **options)

    @app.post("/test/unload/{model}")
    async def unload(model: str) -> Response:
        await app.state.service.engine.unload(model)
        return Response()

    return app


if __name__ == "__main__":
    run(_create, sys.argv[1:])
