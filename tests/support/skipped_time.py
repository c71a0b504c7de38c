"""An event loop with real sockets whose clock skips waiting: timers fire in order, at once."""

import asyncio
import functools
import selectors
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest


class StandstillError(Exception):
    """Every task waits, and no timer is set."""


class SkippingLoop(asyncio.SelectorEventLoop):
    """Moves its clock to the next timer when nothing is ready."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        return self._now

    def skip(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds


class _SkippingSelector(selectors.DefaultSelector):
    def __init__(self, loop: SkippingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise StandstillError("every task waits, and no timer is set")
        # A little further, because the time of a timer is a rounded sum.
        self._loop.skip(timeout + 1e-6)
        return ready


def in_skipped_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test on a `SkippingLoop`; `time.perf_counter` follows its clock."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        with (
            asyncio.Runner(loop_factory=SkippingLoop) as runner,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(time, "perf_counter", runner.get_loop().time)
            runner.run(_whole(test(*args, **options)))

    return run


async def _whole(test: Awaitable[None]) -> None:
    await test


def now() -> float:
    """Return the time of the running loop."""
    return asyncio.get_running_loop().time()


def skip(seconds: float) -> None:
    """Move the clock forward without running anything, as while the process is stopped."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skip(seconds)


async def run_ready(cycles: int = 10) -> None:
    """Let the loop run what is ready, for some cycles, without moving the clock."""
    for _ in range(cycles):
        await asyncio.sleep(0)
