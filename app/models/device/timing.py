"""Measures the time of a computation."""

import time
from collections.abc import Callable

_TRIES = 3
_LONG_SECONDS = 0.2


def shortest(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """The seconds of the fastest of a few runs, as the first one may compile kernels.

    A long run is repeated less often.
    """
    tries: list[float] = []
    while len(tries) < _TRIES and sum(tries) < _LONG_SECONDS:
        began = clock()
        run()
        tries.append(clock() - began)
    return min(tries)
