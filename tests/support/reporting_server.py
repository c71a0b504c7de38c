"""The real service, which at its end prints what of OpenTelemetry was imported."""

import atexit
import os
import sys

from smart_embedder.main import create_app
from smart_embedder.server.process import run

_exit = os._exit


def report() -> None:
    names = [name for name in sys.modules if name.startswith(("opentelemetry", "smart_embedder."))]
    print("imported:", *sorted(names), flush=True)


def report_and_exit(status: int) -> None:
    report()
    _exit(status)


if __name__ == "__main__":
    # The process may end by either way.
    atexit.register(report)
    os._exit = report_and_exit
    run(create_app)
