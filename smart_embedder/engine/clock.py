"""The engine's clock: one for everything in it that measures time or waits for a moment."""

import time
from collections.abc import Callable

# In seconds. Called as `clock.now()`, so that a simulation can put the time of its event loop here.
now: Callable[[], float] = time.perf_counter
