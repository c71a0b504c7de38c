"""The service in a simulated control group: `python -m tests.faults.limited_server`.

LIMIT names a file with the limit in bytes; without the file there is no limit. The memory in use is
that of the process.
"""

import os
from functools import partial
from pathlib import Path

from app.main import create_app
from app.run import run
from smart_embedder.hardware import device as hardware
from smart_embedder.interface import MemoryUsage
from smart_embedder.startup import load_models
from tests.support.memory import status_bytes


def group_usage(*_: Path) -> MemoryUsage | None:
    """Return `anon` and `shmem` of a control group with this process, and its limit."""
    limit = Path(os.environ["LIMIT"])
    if not limit.exists():
        return None
    used = sum(status_bytes("self", field) for field in ("RssAnon", "RssShmem"))
    return MemoryUsage(used, int(limit.read_text()))


if __name__ == "__main__":
    hardware.control_group_usage = group_usage
    run(partial(create_app, loader=load_models))
