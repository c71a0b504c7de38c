"""How many requests may be inside at once, divided fairly between the clients."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from app.errors import QueueFullError


class FairSemaphore:
    """`capacity` permits; one that comes free goes to the waiting client that holds the fewest."""

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
        """Take a permit where one is free."""
        if not self._free:
            return False
        self._free -= 1
        self._held[client] = self.held_by(client) + 1
        return True

    async def acquire(self, client: str) -> None:
        """Take a permit, as soon as it is this client's turn."""
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
            self._forget(client, turn)

    def release(self, client: str) -> None:
        """Give a permit back; whoever is next has it at once."""
        # While it still counts as held: of two clients that want one, each goes in turn.
        heir = self._next_client()
        self._drop(client)
        self._free += 1
        if heir is not None:
            self.try_acquire(heir)
            self._next_turn(heir).set_result(None)
            # Of clients that hold equally many the one goes next that has waited for its turn.
            self._waiters[heir] = self._waiters.pop(heir)

    def transfer(self, giver: str, taker: str) -> None:
        """Let one client's permit be another's, whoever waits."""
        self._drop(giver)
        self._held[taker] = self.held_by(taker) + 1

    def _drop(self, client: str) -> None:
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]

    def _next_client(self) -> str | None:
        waiting = (client for client in self._waiters if self._has_turn(client))
        return min(waiting, key=self.held_by, default=None)

    def _has_turn(self, client: str) -> bool:
        return any(not turn.done() for turn in self._waiters[client])

    def _next_turn(self, client: str) -> "asyncio.Future[None]":
        return next(turn for turn in self._waiters[client] if not turn.done())

    def _forget(self, client: str, turn: "asyncio.Future[None]") -> None:
        waiters = self._waiters[client]
        waiters.remove(turn)
        if not waiters:
            del self._waiters[client]


class ConcurrencyLimit:
    """At most `capacity` requests at once.

    Where no permit is free, a client that holds fewer than another takes that of the other's newest
    request, which is refused; else it waits `patience` seconds for one and is refused then.
    `seconds_to_clear` tells a refused caller when another try makes sense.
    """

    def __init__(
        self, capacity: int, patience: float, full: str, seconds_to_clear: Callable[[], int]
    ) -> None:
        self._patience = patience
        self._full = full
        self._seconds_to_clear = seconds_to_clear
        self._permits = FairSemaphore(capacity)
        self._scopes: dict[str, list[asyncio.Timeout]] = {}

    @property
    def held(self) -> int:
        """How many requests are inside."""
        return self._permits.held

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Hold a permit; raise `QueueFullError` where none comes free in time or it is lost."""
        await self._acquire(client)
        # Without a time limit: it expires when another client needs the permit more.
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.setdefault(client, []).append(scope)
                yield
        except TimeoutError:
            if scope.expired():
                raise self._error() from None
            raise
        finally:
            if self._remove(client, scope):
                self._permits.release(client)

    async def _acquire(self, client: str) -> None:
        if self._permits.try_acquire(client) or self._take_over(client):
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._permits.acquire(client)
        except TimeoutError:
            raise self._error() from None

    def _take_over(self, client: str) -> bool:
        """Take the newest permit of whoever holds most, where that leaves it no worse off."""
        largest = max(self._scopes, key=self._permits.held_by, default=client)
        if self._permits.held_by(client) + 1 >= self._permits.held_by(largest):
            return False
        scope = self._scopes[largest][-1]
        self._remove(largest, scope)
        scope.reschedule(asyncio.get_running_loop().time())
        self._permits.transfer(largest, client)
        return True

    def _remove(self, client: str, scope: asyncio.Timeout) -> bool:
        """Forget a scope; whether it was still there."""
        scopes = self._scopes.get(client, [])
        if scope not in scopes:
            return False
        scopes.remove(scope)
        if not scopes:
            del self._scopes[client]
        return True

    def _error(self) -> QueueFullError:
        return QueueFullError(self._full, retry_after=self._seconds_to_clear())
