"""How long a computation takes."""

import time
from collections.abc import Callable

_TRIES = 3
_LONG_SECONDS = 0.2


def shortest(run: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
    """The seconds of the best of a few runs, the first of which chooses or compiles its kernels.

    Fewer are enough where that is lost in the time of the run itself.
    """
    tries: list[float] = []
    while len(tries) < _TRIES and sum(tries) < _LONG_SECONDS:
        began = clock()
        run()
        tries.append(clock() - began)
    return min(tries)
