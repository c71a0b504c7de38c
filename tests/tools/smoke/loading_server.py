"""The real service, which never finishes loading."""

import threading
from functools import partial

from smart_embedder.engine.model import DefaultModels
from smart_embedder.main import create_app
from smart_embedder.server.process import run
from smart_embedder.settings import Settings


def never(_: Settings) -> DefaultModels:
    threading.Event().wait()
    raise AssertionError


if __name__ == "__main__":
    run(partial(create_app, loader=never))
