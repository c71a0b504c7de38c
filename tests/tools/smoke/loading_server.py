"""The real service, which never finishes loading."""

import threading
from functools import partial

from app.engine.model import LoadedModels
from app.main import create_app
from app.server.process import run
from app.settings import Settings


def never(_: Settings) -> LoadedModels:
    threading.Event().wait()
    raise AssertionError


if __name__ == "__main__":
    run(partial(create_app, loader=never))
