"""The bytes that clients make the service hold, and who gives way where they are too many.

A request that waits for its own client, for more of its body or for its answer to be taken, and
that has not got on for a second, gives way to others. One that the service itself works on never
does.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from app.errors import QueueFullError

STALLED_SECONDS = 1.0
# Less than this in a second is as good as nothing where memory is short.
_PROGRESS_BYTES = 16_384
_SMALL_BODY = 65_536
_SHARE_OF_FREE = 3


@dataclass(eq=False, slots=True)
class Holding:
    """What one request holds; `give_way` ends it, and is None while it waits for nobody."""

    client: str
    give_way: Callable[[], None] | None
    size: int = 0
    moved_at: float = 0.0
    moved: int = 0

    def note_progress(self, size: int, now: float) -> None:
        """The client has sent, or taken, `size` bytes."""
        self.moved += size
        if self.moved >= _PROGRESS_BYTES:
            self.moved_at, self.moved = now, 0


class HeldBytes:
    """What all requests hold of one kind, at most about `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._total = 0
        self._of_client: Counter[str] = Counter()
        self._holdings: set[Holding] = set()

    def release(self, holding: Holding) -> None:
        """Hold nothing of this any more."""
        if holding in self._holdings:
            self._holdings.remove(holding)
            self._change(holding, -holding.size)

    def _hold(self, holding: Holding, size: int, now: float) -> None:
        if holding not in self._holdings:
            self._holdings.add(holding)
            holding.moved_at = now
        self._change(holding, size)

    def _change(self, holding: Holding, size: int) -> None:
        holding.size += size
        self._total += size
        self._of_client[holding.client] += size
        if not self._of_client[holding.client]:
            del self._of_client[holding.client]

    def _end_stalled(self, now: float, client: str | None = None) -> bool:
        """End the request that has waited for its client for longest; of who holds most, or of one.

        Whether there was one to end.
        """
        stalled = [
            holding
            for holding in self._holdings
            if holding.give_way and now - holding.moved_at >= STALLED_SECONDS
            if client is None or holding.client == client
        ]
        if not stalled:
            return False
        worst = max(stalled, key=lambda each: (self._of_client[each.client], -each.moved_at))
        self.release(worst)
        if worst.give_way:
            worst.give_way()
        return True


class HeldBodies(HeldBytes):
    """Bodies that arrive or are worked on.

    A client may hold three times what it leaves free: three quarters where it is alone, and nobody
    can fill the memory. A small body is refused only where there is no room at all.
    """

    def take(self, holding: Holding, size: int) -> None:
        """Hold `size` bytes more of a body; raise `QueueFullError` where there is no room."""
        now = asyncio.get_running_loop().time()
        while not self._fits(holding, size):
            whose = None if self._total + size > self.max_bytes else holding.client
            if not self._end_stalled(now, whose):
                raise QueueFullError(self._refusal(holding), retry_after=1)
        self._hold(holding, size, now)
        holding.note_progress(size, now)

    def _fits(self, holding: Holding, size: int) -> bool:
        free = self.max_bytes - self._total - size
        if free < 0:
            return False
        own = self._of_client[holding.client] + size
        return holding.size + size <= _SMALL_BODY or own <= _SHARE_OF_FREE * free

    def _refusal(self, holding: Holding) -> str:
        return (
            f"bodies in work hold {self._total} bytes, {self._of_client[holding.client]} of them "
            f"from this client; at most {self.max_bytes} are held, 16 times MAX_BODY_BYTES, "
            f"and of one client {_SHARE_OF_FREE} times what is left free"
        )


class HeldAnswers(HeldBytes):
    """Answers that wait to be taken.

    An answer is never refused a place. Where they are too many, who does not take his loses it.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._looking = False

    def add(self, holding: Holding, size: int) -> None:
        """Hold an answer of `size` bytes."""
        self._hold(holding, size, asyncio.get_running_loop().time())
        self._make_room()

    def hand_over(self, holding: Holding, size: int) -> None:
        """The client has made room for `size` bytes of its answer."""
        if holding in self._holdings:
            self._change(holding, -min(size, holding.size))
            holding.note_progress(size, asyncio.get_running_loop().time())

    def _make_room(self) -> None:
        """End what stalls; look again later where that was not enough."""
        loop = asyncio.get_running_loop()
        while self._total > self.max_bytes and self._end_stalled(loop.time()):
            pass
        if self._total > self.max_bytes and not self._looking:
            self._looking = True
            loop.call_later(STALLED_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        self._make_room()
