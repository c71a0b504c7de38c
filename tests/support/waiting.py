"""Waiting for what tells nobody when it comes about: it is asked again and again."""

import threading
import time
from collections.abc import Callable

LIMIT = 120.0


def wait_until(
    condition: Callable[[], object], otherwise: Callable[[], str] | str, pause: float = 0.02
) -> None:
    """Return once `condition` holds; fail at the limit, with what `otherwise` says then."""
    deadline, never = time.monotonic() + LIMIT, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, otherwise() if callable(otherwise) else otherwise
        never.wait(pause)
