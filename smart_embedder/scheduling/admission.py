"""Admission: tokenize texts, long ones off the event loop, and queue jobs for the device.

The threads of the tokenizers are shared fairly between clients, and huge texts have their own.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from smart_embedder.errors import DrainingError
from smart_embedder.interface import Model
from smart_embedder.metrics import EngineMetrics
from smart_embedder.requests import Stage, Timings
from smart_embedder.scheduling.fairness import FairSemaphore, failing_with
from smart_embedder.scheduling.job import Job
from smart_embedder.scheduling.queue import JobQueue

Result = TypeVar("Result")

_MOST_THREADS = 8
# A tokenizer takes about a second for these.
_HUGE_CHARACTERS = 1_000_000
# Characters that become so many under NFKC; no other one becomes more than seven.
_GROWING = {"\ufdfa": 18, "\ufdfb": 8}
# With the number of texts. A tokenizer takes a quarter of a millisecond for these, which is about
# what a change to another thread and back takes.
_FEW_CHARACTERS = 256

# Set when nobody waits any longer for the result of the call that runs on this thread.
_given_up: ContextVar[threading.Event | None] = ContextVar("given_up", default=None)


class GivenUpError(Exception):
    """Nobody waits for the result of this call any longer; seen only on its thread."""


def stop_if_given_up() -> None:
    """Raise `GivenUpError` where nobody waits any longer for the call that runs on this thread."""
    given_up = _given_up.get()
    if given_up is not None and given_up.is_set():
        raise GivenUpError


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


def timings_of(started: float, *, tokenized: Iterable[Stage], jobs: Iterable[Job]) -> Timings:
    """Seconds in each stage until now; `queue` is all time outside tokenizing and forwards.

    The stages of a job are its wait for the first forward, and from there to the end of the last.
    """
    total = time.perf_counter() - started
    stages, inference = [*tokenized], 0.0
    tokenize = sum(stage.ended - stage.began for stage in stages)
    for job in jobs:
        inference += job.inference_seconds
        taken, completed, model = job.first_taken_at, job.last_completed_at, job.model.name
        if taken is not None:
            stages.append(Stage("queue", job.enqueued_at, taken, model))
            if completed is not None:
                stages.append(Stage("forward", taken, completed, model, job.inference_seconds))
    queue = max(0.0, total - tokenize - inference)
    return Timings(tokenize, queue, inference, total, tuple(stages))
