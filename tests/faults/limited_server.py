"""The service as in a control group of its own: `python -m tests.faults.limited_server`.

LIMIT names a file with the group's bytes, without which there is no limit. What is in use is what
the system says of the process.
"""

import os
from functools import partial
from pathlib import Path

from app.main import create_app
from app.server import run
from smart_embedder.hardware import device as choose
from smart_embedder.interface import MemoryUsage
from smart_embedder.startup import load_models
from tests.support.memory import status_bytes


def group_usage(*_: Path) -> MemoryUsage | None:
    """What a control group's `anon` and `shmem` are where one process is in it."""
    limit = Path(os.environ["LIMIT"])
    if not limit.exists():
        return None
    used = sum(status_bytes("self", field) for field in ("RssAnon", "RssShmem"))
    return MemoryUsage(used, int(limit.read_text()))


if __name__ == "__main__":
    choose.control_group_usage = group_usage
    run(partial(create_app, loader=load_models))
