"""The service as in a control group of its own: `python -m tests.faults.limited_server`.

LIMIT names a file with the group's bytes, without which there is no limit. What is in use is what
the system says of the process. While the file HOLD exists, every loading of a model waits.
"""

import os
import threading
from functools import partial
from pathlib import Path

from smart_embedder.engine.model import MemoryUsage
from smart_embedder.main import create_app
from smart_embedder.models import loader as model_loader
from smart_embedder.models.device import choose
from smart_embedder.models.load import load_models
from smart_embedder.server.process import run
from tests.support.memory import status_bytes

_load = model_loader._load


def group_usage(*_: Path) -> MemoryUsage | None:
    """What a control group's `anon` and `shmem` are where one process is in it."""
    limit = Path(os.environ["LIMIT"])
    if not limit.exists():
        return None
    used = sum(status_bytes("self", field) for field in ("RssAnon", "RssShmem"))
    return MemoryUsage(used, int(limit.read_text()))


def load(*arguments):
    pause = threading.Event()
    while Path(os.environ["HOLD"]).exists():
        pause.wait(0.01)
    return _load(*arguments)


if __name__ == "__main__":
    choose.control_group_usage = group_usage
    model_loader._load = load
    run(partial(create_app, loader=load_models))
