"""How many requests may be in work at once, divided fairly between the clients."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from smart_embedder.errors import QueueFullError

Result = TypeVar("Result")


class FairSemaphore:
    """`capacity` permits; a freed one goes to the waiting client that holds the fewest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
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

    def try_acquire(self, client: str) -> bool:
        """Take a permit if one is free."""
        if not self._free:
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
            each: turn
            for each, turns in self._waiters.items()
            if (turn := next((turn for turn in turns if not turn.done()), None)) is not None
        }
        if waiting:
            # Who holds the fewest; of equals another one than `client`, so that two alternate.
            chosen = min(waiting, key=lambda each: (self.held_by(each), each == client))
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
    """At most `capacity` requests at once.

    Where no permit is free, a client that holds fewer than another one takes over the permit of
    that client's newest request, which is then refused. Otherwise it waits for `acquire_timeout`
    seconds at most, and is refused. `seconds_to_place` gives the Retry-After of a refusal, the
    seconds until a permit is free, and `full` its message.
    """

    def __init__(
        self, capacity: int, acquire_timeout: float, full: str, seconds_to_place: Callable[[], int]
    ) -> None:
        super().__init__(capacity)
        self._acquire_timeout = acquire_timeout
        self._full = full
        self._seconds_to_place = seconds_to_place
        self._scopes: dict[asyncio.Timeout, str] = {}  # The oldest first.

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Hold a permit; raise `QueueFullError` if none is free in time or it is taken over."""
        await self._enter(client)
        async with failing_with(self._error) as scope:
            self._scopes[scope] = client
            try:
                yield
            finally:
                if self._scopes.pop(scope, None) is not None:
                    self.release(client)

    async def _enter(self, client: str) -> None:
        if self.try_acquire(client) or self._take_over(client):
            return
        # Who was handed a permit at this moment holds it, but can lose it only once it has run.
        await asyncio.sleep(0)
        if self.try_acquire(client) or self._take_over(client):
            return
        async with failing_with(self._error, self._acquire_timeout):
            await self.acquire(client)

    def _take_over(self, client: str) -> bool:
        """Take the newest permit of the client that holds most, unless it would then hold fewer."""
        clients = dict.fromkeys(self._scopes.values())
        largest = max(clients, key=self.held_by, default=client)
        if self.held_by(client) + 1 >= self.held_by(largest):
            return False
        scope = next(each for each, of in reversed(self._scopes.items()) if of == largest)
        del self._scopes[scope]
        scope.reschedule(0)
        self._held[largest] -= 1
        self._held[client] = self.held_by(client) + 1
        return True

    def _error(self) -> QueueFullError:
        return QueueFullError(self._full, retry_after=self._seconds_to_place())
