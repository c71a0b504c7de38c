"""The service with a device that tests hold and break: `python -m tests.faults.faulty_server`.

While the file HOLD exists, every forward waits. While the file BREAK exists, forwards fail with a
lasting hardware error.
"""

import dataclasses
import os
from functools import partial
from pathlib import Path

from app.main import create_app
from app.run import run
from app.settings import Settings
from smart_embedder.interface import DefaultModels, PlacedModels
from smart_embedder.startup import load_models
from tests.support.accelerator import broken_memory
from tests.support.waiting import wait_until


class FaultyModel:
    """A real model whose launches wait and fail while the files exist."""

    def __init__(self, model) -> None:
        self._model = model
        self._hold, self._break = (Path(os.environ.get(name, "")) for name in ("HOLD", "BREAK"))

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def launch(self, sequences, outputs):
        wait_until(lambda: not self._hold.is_file(), "the device was held too long")
        if self._break.is_file():
            raise broken_memory()
        return self._model.launch(sequences, outputs)


def load(settings: Settings) -> DefaultModels:
    models = load_models(settings)
    return dataclasses.replace(models, models=tuple(map(faulty, models.models)))


def faulty(placed: PlacedModels) -> PlacedModels:
    """Make the model on the first device faulty."""
    first, *others = placed.models
    first = dataclasses.replace(first, model=FaultyModel(first.model))
    return dataclasses.replace(placed, models=(first, *others))


if __name__ == "__main__":
    run(partial(create_app, loader=load))
