"""The real service, whose models are never loaded."""

import threading

from app.engine.loading import LoadedModels
from app.process import run
from app.settings import Settings


def never(_: Settings) -> LoadedModels:
    threading.Event().wait()
    raise AssertionError


if __name__ == "__main__":
    run(never)
