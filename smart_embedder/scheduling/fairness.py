"""How many requests may be in work at once, divided fairly between the clients."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from smart_embedder.errors import QueueFullError

Result = TypeVar("Result")
# A client may hold at most this many times what is free, and always one: a newcomer finds room.
_TIMES_FREE = 3


class FairSemaphore:
    """`capacity` permits; a freed one goes to the waiting client that holds the fewest.

    With `times_free` a client may hold at most that many times what is free, and always one.
    """

    def __init__(self, capacity: int, times_free: int | None = None) -> None:
        self._capacity = capacity
        self._times_free = times_free
        self._free = capacity
        self._held: dict[str, int] = {}
        self._waiters: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def held(self) -> int:
        """How many permits are held."""
        return self._capacity - self._free

    def held_by(self, client: str) -> int:
        """How many permits one client holds."""
        return self._held.get(client, 0)

    def may_acquire(self, client: str) -> bool:
        """Whether this client may have a permit."""
        held = self.held_by(client)
        if not self._free or not held or self._times_free is None:
            return self._free > 0
        return held + 1 <= self._times_free * (self._free - 1)

    def try_acquire(self, client: str) -> bool:
        """Take a permit if the client may have one."""
        if not self.may_acquire(client):
            return False
        self._free -= 1
        self._held[client] = self._held.get(client, 0) + 1
        return True

    async def acquire(self, client: str) -> None:
        """Wait for a permit and take it."""
        if self.try_acquire(client):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # It was handed over in the same moment.
                self.release(client)
            raise
        finally:
            waiters = self._waiters[client]
            waiters.remove(turn)
            if not waiters:
                del self._waiters[client]

    def release(self, client: str) -> None:
        """Return a permit; the next waiting client gets it at once."""
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._free += 1
        waiting = {
            name: turn
            for name, turns in self._waiters.items()
            if (turn := next((turn for turn in turns if not turn.done()), None)) is not None
            and self.may_acquire(name)
        }
        if waiting:
            # Who holds the fewest; of equals another one than `client`, so that two alternate.
            chosen = min(waiting, key=lambda name: (self.held_by(name), name == client))
            self.try_acquire(chosen)
            waiting[chosen].set_result(None)
            # Last in the order, so that clients that hold equally many alternate.
            self._waiters[chosen] = self._waiters.pop(chosen)


@asynccontextmanager
async def failing_with(
    error: Callable[[], Exception], seconds: float | None = None
) -> AsyncIterator[asyncio.Timeout]:
    """A block that raises what `error` makes after `seconds`.

    Whoever has the timeout that it yields can `reschedule` that, such as to 0: at once.
    """
    try:
        async with asyncio.timeout(seconds) as timeout:
            yield timeout
    except TimeoutError:
        if not timeout.expired():
            raise
        raise error() from None


class ConcurrencyLimit(FairSemaphore):
    """At most `capacity` requests at once, of one client at most three times what is free.

    A request that may have no permit waits for `acquire_timeout` seconds at most, and is refused
    with `full` as the message. `seconds_to_place` gives the Retry-After of a refusal.
    """

    def __init__(
        self, capacity: int, acquire_timeout: float, full: str, seconds_to_place: Callable[[], int]
    ) -> None:
        super().__init__(capacity, _TIMES_FREE)
        self._acquire_timeout = acquire_timeout
        self._full = full
        self._seconds_to_place = seconds_to_place

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Hold a permit; raise `QueueFullError` if there is none in time."""
        async with failing_with(self._error, self._acquire_timeout):
            await self.acquire(client)
        try:
            yield
        finally:
            self.release(client)

    def _error(self) -> QueueFullError:
        return QueueFullError(self._full, retry_after=self._seconds_to_place())
