"""An event loop with real sockets whose clock skips the waiting: timers fire in order, at once."""

import asyncio
import functools
import selectors
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest


class StandstillError(Exception):
    """Nobody will ever be woken again."""


class SkippingLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing is ready; then the clock moves to the next timer."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        return self._now

    def skip(self, seconds: float) -> None:
        """Let time pass."""
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
            raise StandstillError("everybody waits, and nothing will ever happen again")
        # A little further: the loop takes a sum of floats for the moment of a timer.
        self._loop.skip(timeout + 1e-6)
        return ready


def in_skipped_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test on such a loop; what measures seconds has its time, too."""

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
    """The skipping clock."""
    return asyncio.get_running_loop().time()


def skip(seconds: float) -> None:
    """Let time pass in which nothing runs, as while the process is stopped."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skip(seconds)


async def turns(count: int = 10) -> None:
    """Let the loop run what is ready, without time passing."""
    for _ in range(count):
        await asyncio.sleep(0)
