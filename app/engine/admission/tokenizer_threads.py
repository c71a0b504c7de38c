"""Threads for tokenisers, shared fairly between clients.

Huge texts have their own thread, so that others do not wait for them. Work on such a thread ends
soon after its request: what it calls between two slices of a text is `stop_if_given_up`.
"""

import asyncio
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar

from app.engine.admission.concurrency import FairSemaphore
from app.errors import SmartEmbedderError

Result = TypeVar("Result")

_MOST_THREADS = 8
# U+FDFA becomes 18 characters under NFKC, U+3316 18 bytes, U+1D160 12 under NFC.
_LIGATURES = re.compile(
    "[\u2474-\u24b5\u3200-\u33ff\ufd00-\ufdff\U0001d100-\U0001d1ff\U0001f100-\U0001f2ff]"
)
NORMALIZATION_GROWTHS = (1, 4, 18)
# A tokenizer takes about a second for these.
_HUGE_CHARACTERS = 1_000_000
# Scanned in one call, during which Python's other threads wait.
_SCAN_CHARACTERS = 65_536

# Set when nobody waits any longer for the result of the call that runs on this thread.
_given_up: ContextVar[threading.Event | None] = ContextVar("given_up", default=None)


class GivenUpError(Exception):
    """Nobody waits for the result of this call any longer; seen only on its thread."""


def stop_if_given_up() -> None:
    """Raise `GivenUpError` where nobody waits any longer for the call that runs on this thread."""
    given_up = _given_up.get()
    if given_up is not None and given_up.is_set():
        raise GivenUpError


class TokenizerThreads:
    """`count` threads for requests of usual size, and one for huge ones, which take seconds."""

    def __init__(self, count: int | None) -> None:
        usual = count or min(os.cpu_count() or 1, _MOST_THREADS)
        self._usual = _FairThreads(usual, "tokenizer")
        self._huge = _FairThreads(1, "tokenizer-huge")
        self._scopes: set[asyncio.Timeout] = set()
        self._aborted_by: SmartEmbedderError | None = None

    async def run(self, call: Callable[[], Result], texts: list[str], client: str) -> Result:
        """Run `call`, which tokenises `texts`, on a thread; return its result."""
        # It has no deadline until all are aborted.
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                if self._aborted_by is not None:
                    raise self._aborted_by
                threads = self._huge if await self._are_huge(texts, client) else self._usual
                return await threads.run(call, client)
        except TimeoutError:
            if self._aborted_by is not None and scope.expired():
                raise self._aborted_by from None
            raise
        finally:
            self._scopes.discard(scope)

    def abort(self, error: SmartEmbedderError) -> None:
        """Fail every call, those that run, wait and come."""
        self._aborted_by = error
        while self._scopes:
            self._scopes.pop().reschedule(asyncio.get_running_loop().time())

    async def _are_huge(self, texts: list[str], client: str) -> bool:
        characters = sum(map(len, texts))
        if characters > _HUGE_CHARACTERS:
            return True
        if characters * NORMALIZATION_GROWTHS[-1] <= _HUGE_CHARACTERS or all(
            map(str.isascii, texts)
        ):
            return False
        return await self._usual.run(partial(_are_huge_normalized, texts), client)

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


def _are_huge_normalized(texts: list[str]) -> bool:
    """Whether the texts are huge once they are normalized."""
    return sum(map(_normalized_characters, texts)) > _HUGE_CHARACTERS


def _normalized_characters(text: str) -> int:
    """An upper bound, apart from the small growth of characters other than ligatures."""
    stop_if_given_up()
    parts = (text[i : i + _SCAN_CHARACTERS] for i in range(0, len(text), _SCAN_CHARACTERS))
    return sum(
        len(part)
        * (
            NORMALIZATION_GROWTHS[-1]
            if normalization_growth(part) == NORMALIZATION_GROWTHS[-1]
            else 1
        )
        for part in parts
    )


def normalization_growth(text: str) -> int:
    """The most characters that normalization makes of one in `text`: in NORMALIZATION_GROWTHS.

    Under NFC, NFD, NFKC and NFKD alike; those characters have at most four bytes for each of this
    number, in UTF-8.
    """
    if text.isascii():
        return 1
    return 18 if _LIGATURES.search(text) else 4
