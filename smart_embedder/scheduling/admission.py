"""Admission: limit the requests, tokenize their texts, and queue their jobs.

Clients share the tokenizer threads fairly. Huge texts have a thread of their own.
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
from smart_embedder.requests import ImageInput
from smart_embedder.results import Stage
from smart_embedder.scheduling.job import Job
from smart_embedder.scheduling.queue import JobQueue

# A client may hold at most this many times the free permits, and always one, so that new clients
# find a free permit.
_TIMES_FREE = 3

Result = TypeVar("Result")

_MAX_THREADS = 8
# A tokenizer takes about a second for this many characters.
_HUGE_CHARACTERS = 1_000_000
# The number of characters into which NFKC expands these; it expands others to at most seven.
_EXPANSIONS = {"\ufdfa": 18, "\ufdfb": 8}
# The limit for characters plus texts. A tokenizer takes a quarter of a millisecond for them, about
# as long as a switch to another thread and back.
_FEW_CHARACTERS = 256


class Abortable:
    """Fails everything that is awaited in one of its scopes, once `abort` is called."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._aborted = False

    @asynccontextmanager
    async def scope(self) -> AsyncIterator[None]:
        """Raise `DrainingError` in the block once `abort` is called."""
        if self._aborted:
            raise _stopped()
        async with failing_with(_stopped) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)

    def abort(self) -> None:
        """Fail all current and later scopes."""
        self._aborted = True
        while self._scopes:
            self._scopes.pop().reschedule(0)


def _stopped() -> DrainingError:
    return DrainingError("the service was stopped before this was done", retry_after=5)


class TokenizerThreads:
    """`count` threads for requests of usual size, and one for huge requests, which take seconds.

    One thread fewer, but at least one, decodes pictures, so that texts do not wait for them. Very
    short requests run on the event loop itself, at most one in each of its iterations.
    """

    def __init__(self, count: int | None) -> None:
        self._loop_is_free = True
        usual = count or min(os.cpu_count() or 1, _MAX_THREADS)
        self._usual = _FairThreads(usual, "tokenizer")
        self._huge = _FairThreads(1, "tokenizer-huge")
        self._images = _FairThreads(max(1, usual - 1), "images")

    async def run(self, call: Callable[[], Result], texts: Sequence[Any], client: str) -> Result:
        """Run `call`, which tokenizes texts and reads pictures; return its result."""
        if ImageInput in set(map(type, texts)):
            return await self._images.run(call, client)
        characters = sum(map(len, texts))
        if self._loop_is_free and characters + len(texts) <= _FEW_CHARACTERS:
            self._loop_is_free = False
            asyncio.get_running_loop().call_soon(self._free_loop)
            return call()
        for character, count in _EXPANSIONS.items():
            characters += (count - 1) * sum([text.count(character) for text in texts])
        is_huge = characters > _HUGE_CHARACTERS
        return await (self._huge if is_huge else self._usual).run(call, client)

    def _free_loop(self) -> None:
        self._loop_is_free = True

    def close(self) -> None:
        """Cancel the calls that have not begun."""
        for threads in (self._usual, self._huge, self._images):
            threads.close()


class _FairThreads:
    """A thread pool that gives a free thread to the waiting client that uses the fewest."""

    def __init__(self, count: int, name: str) -> None:
        self._permits = FairSemaphore(count)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, call: Callable[[], Result], client: str) -> Result:
        """Run `call` on a thread.

        If the caller is cancelled, the call runs on until it next calls `stop_if_given_up`.
        """
        await self._permits.acquire(client)
        given_up, context = threading.Event(), copy_context()
        context.run(_given_up.set, given_up)

        def release_thread(done: "asyncio.Future[Result]") -> None:
            self._permits.release(client)
            if not done.cancelled():
                done.exception()  # Marks it as retrieved: the caller may have been cancelled.

        running = asyncio.get_running_loop().run_in_executor(self._threads, context.run, call)
        running.add_done_callback(release_thread)
        try:
            return await asyncio.shield(running)
        finally:
            given_up.set()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Admission:
    """Tokenizes the texts of requests that hold a permit, and queues their jobs.

    `threads` also run other work whose duration grows with the texts. Each request runs in a scope
    of `accepted`.
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
        self, model: Model, call: Callable[[], Result], texts: Sequence[Any], client: str
    ) -> tuple[Result, Stage]:
        """Run `call`, which tokenizes `texts` with the tokenizer of `model`.

        Returns its result and its start and end.
        """
        started = time.perf_counter()
        result = await self.threads.run(call, texts, client)
        ended = time.perf_counter()
        self._metrics.tokenized(ended - started)
        return result, Stage("tokenize", started, ended, model.name)

    async def submit(self, *jobs: Job) -> None:
        """Queue jobs; return when devices have taken all of them, or raise when one fails.

        Cancelling the caller cancels the jobs.
        """
        try:
            for job in jobs:
                self._queue.put(job)
            await _gather([job.wait_until_taken() for job in jobs])
        except BaseException:
            for job in jobs:
                job.cancel()
            raise

    async def run(self, job: Job) -> list[Any]:
        """Queue a job; return its results, or raise its error."""
        await self.submit(job)
        (results,) = await self.results(job)
        return results

    async def results(self, *jobs: Job) -> list[list[Any]]:
        """Wait for the results of each job; if one fails, cancel the others."""
        try:
            return await _gather([job.result() for job in jobs])
        finally:
            for job in jobs:
                job.cancel()


async def _gather(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Await coroutines as `asyncio.gather` does, but a single one without a task.

    Nearly every request has a single job.
    """
    if len(coroutines) == 1:
        return [await coroutines[0]]
    return await asyncio.gather(*coroutines)


class FairSemaphore:
    """A semaphore that gives a released permit to the waiting client that holds the fewest.

    With `times_free`, a client may hold at most that many times the free permits, and always one.
    """

    def __init__(self, capacity: int, times_free: int | None = None) -> None:
        self._capacity = capacity
        self._times_free = times_free
        self._free = capacity
        self._held: dict[str, int] = {}
        self._waiters: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def held(self) -> int:
        """The number of permits that are held."""
        return self._capacity - self._free

    def held_by(self, client: str) -> int:
        """Return how many permits the client holds."""
        return self._held.get(client, 0)

    def may_acquire(self, client: str) -> bool:
        """Return True if the client may have a permit."""
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
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(client, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            # The permit may have been given to this waiter just before it was cancelled.
            if waiter.done() and not waiter.cancelled():
                self.release(client)
            raise
        finally:
            waiters = self._waiters[client]
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[client]

    def release(self, client: str) -> None:
        """Release a permit; the next waiting client gets it at once."""
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._free += 1
        waiting = {
            name: waiter
            for name, waiters in self._waiters.items()
            if (waiter := next((waiter for waiter in waiters if not waiter.done()), None))
            is not None
            and self.may_acquire(name)
        }
        if waiting:
            # Among clients with equally few permits, prefer another one than `client`.
            chosen = min(waiting, key=lambda name: (self.held_by(name), name == client))
            self.try_acquire(chosen)
            waiting[chosen].set_result(None)
            # Move the client to the end, so that clients with equally many permits alternate.
            self._waiters[chosen] = self._waiters.pop(chosen)


class ConcurrencyLimit(FairSemaphore):
    """Limits the requests at once to `capacity`, and each client to three times the free permits.

    A request waits for a permit for at most `acquire_timeout` seconds, and is then refused with
    `message`. `retry_after` returns the seconds after which the client should try again.
    """

    def __init__(
        self, capacity: int, acquire_timeout: float, message: str, retry_after: Callable[[], int]
    ) -> None:
        super().__init__(capacity, _TIMES_FREE)
        self._acquire_timeout = acquire_timeout
        self._message = message
        self._retry_after = retry_after

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Hold a permit in the block; raise `QueueFullError` if there is none in time."""
        async with failing_with(self._queue_full, self._acquire_timeout):
            await self.acquire(client)
        try:
            yield
        finally:
            self.release(client)

    def _queue_full(self) -> QueueFullError:
        return QueueFullError(self._message, retry_after=self._retry_after())
