"""The whole service with a device that fails on purpose: `python -m tests.faults.faulty_server`.

FAULTS says what goes wrong in which forward after the warm-up, such as `3:raise,5:exit`:
raise        a RuntimeError, as a broken kernel would
exit         the device thread ends
lose         a GPU's lasting error: its memory is broken
crash        a GPU's lasting error that the batch may have caused, such as an illegal access
hold         the forward comes back once the file GATE exists
While the file HOLD exists, every forward waits.
KERNEL says what the fast path of linear layers does: `wrong` or `raise`.
Besides, a forward of more than MEMORY_TOKENS tokens is out of memory.
"""

import dataclasses
import os
import sys
from functools import partial
from pathlib import Path

import torch

from smart_embedder.engine.model import DefaultModels, PlacedModels
from smart_embedder.main import create_app
from smart_embedder.models import loader
from smart_embedder.models.load import load_models
from smart_embedder.models.ops.backend import torch_backend
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.server.process import run
from smart_embedder.settings import Settings
from tests.support.accelerator import broken_memory, illegal_access
from tests.support.waiting import wait_until


class FaultyModel:
    """A real model behind a device boundary that fails as planned."""

    def __init__(self, model) -> None:
        self._model = model
        self._forwards = 0
        plan = os.environ.get("FAULTS", "")
        self._plan = dict(entry.split(":") for entry in plan.split(",") if entry)
        self._memory = int(os.environ.get("MEMORY_TOKENS", "0"))
        self._hold = os.environ.get("HOLD")

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def launch(self, sequences, outputs):
        self._forwards += 1
        match self._plan.get(str(self._forwards)):
            case "raise":
                raise RuntimeError("the kernel is unwell")
            case "exit":
                sys.exit("the device thread ends")
            case "lose":
                raise broken_memory()
            case "crash":
                raise illegal_access()
            case "hold":
                wait_until(Path(os.environ["GATE"]).exists, "never opened")
        if self._hold:
            wait_until(lambda: not Path(self._hold).exists(), "never let go")
        if self._memory and sum(map(len, sequences)) > self._memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._model.launch(sequences, outputs)


def _plant(kernel: str) -> None:
    """Put a faulty kernel in the place of the fastest."""

    def linear(layers, activation=None):
        right = torch_backend().linear(layers, activation)

        def compute(states):
            if kernel == "raise":
                raise RuntimeError(f"no kernel image in {Path.cwd()}")
            return right(states) * 1.01

        return compute

    def choose(*arguments):
        backend = choose_backend(*arguments)
        return backend.faster(backend.fastest("linear"), linear=linear)

    loader.choose_backend = choose


def load(settings: Settings) -> DefaultModels:
    models = load_models(settings)
    return dataclasses.replace(models, models=tuple(map(faulty, models.models)))


def faulty(placed: PlacedModels) -> PlacedModels:
    """With a first device that fails."""
    first, *others = placed.models
    first = dataclasses.replace(first, model=FaultyModel(first.model))
    return dataclasses.replace(placed, models=(first, *others))


if __name__ == "__main__":
    if "KERNEL" in os.environ:
        _plant(os.environ["KERNEL"])
    run(partial(create_app, loader=load))
