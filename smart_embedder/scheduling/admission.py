"""Admission: tokenize texts, long ones off the event loop, and queue jobs for the device.

The threads of the tokenizers are shared fairly between clients, and huge texts have their own.
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import Any, TypeVar

from smart_embedder.errors import DrainingError, QueueFullError
from smart_embedder.interface import Model
from smart_embedder.interrupts import _given_up, failing_with
from smart_embedder.metrics import EngineMetrics
from smart_embedder.results import Stage
from smart_embedder.scheduling.job import Job
from smart_embedder.scheduling.queue import JobQueue

# A client may hold at most this many times what is free, and always one: a newcomer finds room.
_TIMES_FREE = 3

Result = TypeVar("Result")

_MOST_THREADS = 8
# A tokenizer takes about a second for these.
_HUGE_CHARACTERS = 1_000_000
# Characters that become so many under NFKC; no other one becomes more than seven.
_GROWING = {"\ufdfa": 18, "\ufdfb": 8}
# With the number of texts. A tokenizer takes a quarter of a millisecond for these, which is about
# what a change to another thread and back takes.
_FEW_CHARACTERS = 256


class Abortable:
    """What is awaited within a `scope` fails once `abort` is called, and so do later scopes."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._aborted = False

    @asynccontextmanager
    async def scope(self) -> AsyncIterator[None]:
        """Raises a `DrainingError` once it is aborted."""
        if self._aborted:
            raise _stopped()
        async with failing_with(_stopped) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)

    def abort(self) -> None:
        """Fail what is in a scope, and what comes."""
        self._aborted = True
        while self._scopes:
            self._scopes.pop().reschedule(0)


def _stopped() -> DrainingError:
    return DrainingError("the service was stopped before this was done", retry_after=5)


class TokenizerThreads:
    """`count` threads for requests of usual size, and one for huge ones, which take seconds.

    One of the shortest is run on the event loop itself, at most one each time that the loop turns.
    """

    def __init__(self, count: int | None) -> None:
        self._loop_is_free = True
        usual = count or min(os.cpu_count() or 1, _MOST_THREADS)
        self._usual = _FairThreads(usual, "tokenizer")
        self._huge = _FairThreads(1, "tokenizer-huge")

    async def run(self, call: Callable[[], Result], texts: list[str], client: str) -> Result:
        """Run `call`, which tokenises `texts`; return its result."""
        characters = sum(map(len, texts))
        if self._loop_is_free and characters + len(texts) <= _FEW_CHARACTERS:
            self._loop_is_free = False
            asyncio.get_running_loop().call_soon(self._free_loop)
            return call()
        for character, count in _GROWING.items():
            characters += (count - 1) * sum([text.count(character) for text in texts])
        is_huge = characters > _HUGE_CHARACTERS
        return await (self._huge if is_huge else self._usual).run(call, client)

    def _free_loop(self) -> None:
        self._loop_is_free = True

    def close(self) -> None:
        """Cancel the calls that have not begun."""
        for threads in (self._usual, self._huge):
            threads.close()


class _FairThreads:
    """A thread pool whose next free thread goes to the waiting client that uses the fewest."""

    def __init__(self, count: int, name: str) -> None:
        self._permits = FairSemaphore(count)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, call: Callable[[], Result], client: str) -> Result:
        """Run `call` on a thread.

        If the caller is cancelled, the call ends where it next calls `stop_if_given_up`, and
        occupies the thread until then.
        """
        await self._permits.acquire(client)
        given_up, context = threading.Event(), copy_context()
        context.run(_given_up.set, given_up)

        def free(done: "asyncio.Future[Result]") -> None:
            self._permits.release(client)
            if not done.cancelled():
                done.exception()  # Marks it as retrieved: the caller may have been cancelled.

        running = asyncio.get_running_loop().run_in_executor(self._threads, context.run, call)
        running.add_done_callback(free)
        try:
            return await asyncio.shield(running)
        finally:
            given_up.set()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Admission:
    """Tokenises the texts of requests that hold a permit, and queues their jobs.

    `threads` also run what else costs more with the size of texts. Each request is in a scope of
    `accepted`.
    """

    def __init__(
        self,
        queue: JobQueue,
        threads: TokenizerThreads,
        accepted: Abortable,
        metrics: EngineMetrics,
    ) -> None:
        self.threads = threads
        self.accepted = accepted
        self._queue = queue
        self._metrics = metrics

    async def tokenize(
        self, model: Model, call: Callable[[], Result], texts: list[str], client: str
    ) -> tuple[Result, Stage]:
        """Run `call`, which tokenises `texts` with the tokenizer of `model`.

        Returns its result, and when it ran.
        """
        started = time.perf_counter()
        result = await self.threads.run(call, texts, client)
        ended = time.perf_counter()
        self._metrics.tokenized(ended - started)
        return result, Stage("tokenize", started, ended, model.name)

    async def submit(self, *jobs: Job) -> None:
        """Queue jobs; return when the device has taken all of them, or raise when one fails.

        Cancelling the caller cancels the jobs.
        """
        try:
            for job in jobs:
                self._queue.put(job)
            await _all([job.dequeued() for job in jobs])
        except BaseException:
            for job in jobs:
                job.cancel()
            raise

    async def run(self, job: Job) -> list[Any]:
        """Queue a job; return its results, or raise the error that it fails with."""
        await self.submit(job)
        (results,) = await self.results(job)
        return results

    async def results(self, *jobs: Job) -> list[list[Any]]:
        """The results of each job; if one fails, the others are cancelled."""
        try:
            return await _all([job.result() for job in jobs])
        finally:
            for job in jobs:
                job.cancel()


async def _all(waits: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """As `asyncio.gather`, but without a task for a single one, which nearly every request has."""
    return [await waits[0]] if len(waits) == 1 else await asyncio.gather(*waits)


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
