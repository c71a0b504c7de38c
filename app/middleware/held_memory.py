"""The bytes of bodies and answers that the service holds for clients, and who is evicted."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from app.engine.answer_memory import BYTES_PER_BODY_BYTE, AnswerMemory
from app.errors import QueueFullError

STALLED_SECONDS = 1.0
# Fewer bytes than this in a second count as no progress where memory is short.
_PROGRESS_BYTES = 16_384
_SHARE_OF_FREE = 3


@dataclass(eq=False, slots=True)
class Reservation:
    """The bytes held for one request; `evict` ends it, and is None while it must not be evicted."""

    client: str
    evict: Callable[[], None] | None
    size: int = 0
    progress_at: float = 0.0
    bytes_since: int = 0

    def record_progress(self, size: int, now: float) -> None:
        """Record that the client has sent, or read, `size` bytes."""
        self.bytes_since += size
        if self.bytes_since >= _PROGRESS_BYTES:
            self.progress_at, self.bytes_since = now, 0


class Memory:
    """The bytes held for all requests, of bodies or of responses, about `max_bytes` at most.

    A client may hold three times the bytes that are free, which is three quarters for a single one,
    so that no client can fill the memory. What is small is refused only without any room at all.
    """

    _small = 65_536

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._total = 0
        self._by_client: Counter[str] = Counter()
        self._reservations: set[Reservation] = set()

    def release(self, reservation: Reservation) -> None:
        """Release all of it."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            self._change(reservation, -reservation.size)

    def release_part(self, reservation: Reservation, size: int) -> None:
        """Release `size` bytes of it."""
        if reservation in self._reservations:
            self._change(reservation, -min(size, reservation.size))

    def _make_room(self, reservation: Reservation, size: int, now: float) -> bool:
        """Evict stalled requests until `size` more bytes fit; False if they do not."""
        while not self._fits(reservation, size):
            client = None if self._total + size > self.max_bytes else reservation.client
            if not self._evict_stalled(now, client):
                return False
        return True

    def _fits(self, reservation: Reservation, size: int) -> bool:
        free = self.max_bytes - self._total - size
        if free < 0:
            return False
        own = self._by_client[reservation.client] + size
        return reservation.size + size <= self._small or own <= _SHARE_OF_FREE * free

    def _add(self, reservation: Reservation, size: int, now: float) -> None:
        if reservation not in self._reservations:
            self._reservations.add(reservation)
            reservation.progress_at = now
        self._change(reservation, size)

    def _change(self, reservation: Reservation, size: int) -> None:
        reservation.size += size
        self._total += size
        self._by_client[reservation.client] += size
        if not self._by_client[reservation.client]:
            del self._by_client[reservation.client]

    def _evict_stalled(self, now: float, client: str | None = None) -> bool:
        """Evict one stalled request, of `client` or else of the client that holds most.

        It is the one that has made no progress for longest. False if none is stalled.
        """
        stalled = [
            each
            for each in self._reservations
            if each.evict and now - each.progress_at >= STALLED_SECONDS
            if client is None or each.client == client
        ]
        if not stalled:
            return False
        worst = max(stalled, key=lambda each: (self._by_client[each.client], -each.progress_at))
        self.release(worst)
        if worst.evict:
            worst.evict()
        return True


class BodyMemory(Memory):
    """Request bodies that arrive or are worked on."""

    def reserve(self, reservation: Reservation, size: int) -> None:
        """Hold `size` more bytes of a body; raise `QueueFullError` if there is no room."""
        now = asyncio.get_running_loop().time()
        if not self._make_room(reservation, size, now):
            raise QueueFullError(
                f"bodies in work hold {self._total} bytes, {self._by_client[reservation.client]} "
                f"of them from this client; at most {self.max_bytes} are held, 16 times "
                f"MAX_BODY_BYTES, and of one client {_SHARE_OF_FREE} times what is left free",
                retry_after=1,
            )
        self._add(reservation, size, now)
        reservation.record_progress(size, now)


class ResponseMemory(Memory):
    """Answers that are to be made, are made, or wait to be read.

    One that is to be made is refused where there is no room. One that is made is not, but evicted
    if it stalls.
    """

    _small = 1 << 20

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._check_scheduled = False

    def promise(self, reservation: Reservation, size: int) -> None:
        """Hold `size` more bytes for an answer to come; raise `QueueFullError` without room."""
        now = asyncio.get_running_loop().time()
        if not self._make_room(reservation, size, now):
            raise QueueFullError(
                f"answers in work hold {self._total} bytes, {self._by_client[reservation.client]} "
                f"of them for this client, and this one needs {size} more; at most "
                f"{self.max_bytes} are held, 16 times MAX_BODY_BYTES or 4 times MAX_ANSWER_BYTES, "
                f"and of one client {_SHARE_OF_FREE} times what is left free",
                retry_after=1,
            )
        self._add(reservation, size, now)

    def reserve(self, reservation: Reservation, size: int) -> None:
        """Hold `size` bytes of a response that is there."""
        self._add(reservation, size, asyncio.get_running_loop().time())
        self._evict_until_it_fits()

    def release_sent(self, reservation: Reservation, size: int) -> None:
        """Release `size` bytes that were sent."""
        self.release_part(reservation, size)
        reservation.record_progress(size, asyncio.get_running_loop().time())

    def _evict_until_it_fits(self) -> None:
        """Evict stalled responses; check again later if that is not enough."""
        loop = asyncio.get_running_loop()
        while self._total > self.max_bytes and self._evict_stalled(loop.time()):
            pass
        if self._total > self.max_bytes and not self._check_scheduled:
            self._check_scheduled = True
            loop.call_later(STALLED_SECONDS, self._check_again)

    def _check_again(self) -> None:
        self._check_scheduled = False
        self._evict_until_it_fits()


class HeldAnswer(AnswerMemory):
    """What the answer to one request may hold: `max_bytes`, and more for a large body.

    It is taken from `responses` before it is made. `begin` is called when its first bytes are sent.
    """

    def __init__(
        self,
        responses: ResponseMemory,
        client: str,
        max_bytes: int,
        cut_off: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(max_bytes)
        self._responses = responses
        self._reservation = Reservation(client, None)
        self._cut_off = cut_off
        self._is_rendered = False
        self._is_released = False

    @property
    def allowed(self) -> int:
        """The most bytes that the answer may hold."""
        return self._allowed + BYTES_PER_BODY_BYTE * self.body_bytes

    def need(self, size: int, what: str, advice: str) -> None:
        """Implement `AnswerMemory`."""
        super().need(size, what, advice)
        # Work that others share goes on when its request is over, and is counted for them.
        if size > self._reservation.size and not self._is_released:
            self._responses.promise(self._reservation, size - self._reservation.size)

    def begin(self, length: int | None) -> None:
        """The answer is there: `length` bytes, or None where it is rendered while it is read.

        Then its vectors are held to the end, and so are the texts of the request.
        """
        self._is_rendered = length is not None
        if length is not None:
            self._responses.release(self._reservation)
        # From now on, and not from when it was begun to be made.
        self._reservation.progress_at = asyncio.get_running_loop().time()
        self._reservation.evict = self._cut_off
        self._responses.reserve(self._reservation, self.body_bytes if length is None else length)

    def sent(self, size: int) -> None:
        """Record that `size` bytes of it were sent."""
        if self._is_rendered:
            self._responses.release_sent(self._reservation, size)
        else:
            self._reservation.record_progress(size, asyncio.get_running_loop().time())

    def release(self) -> None:
        """Hold nothing any more, whatever is needed later."""
        self._is_released = True
        self._responses.release(self._reservation)
        self._reservation.evict = self._cut_off = None  # Ends a reference cycle.
