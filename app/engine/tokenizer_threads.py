"""Threads for tokenisers, shared fairly between clients.

Enormous texts have a thread of their own, so that they hold up no others.
"""

import asyncio
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from app.engine.concurrency import FairSemaphore

Result = TypeVar("Result")

_MOST_THREADS = 8
# U+FDFA becomes 18 characters under NFKC, U+3316 18 bytes, U+1D160 12 under NFC.
_LIGATURES = re.compile(
    "[\u2474-\u24b5\u3200-\u33ff\ufd00-\ufdff\U0001d100-\U0001d1ff\U0001f100-\U0001f2ff]"
)
GROWTHS = (1, 4, 18)
# About a second's work.
_ENORMOUS_CHARACTERS = 1_000_000
# Looked at in one go, as Python's other threads wait meanwhile.
_GLANCE_CHARACTERS = 65_536


class TokenizerThreads:
    """`count` threads for requests of usual size, and one for those that take seconds."""

    def __init__(self, count: int | None) -> None:
        usual = count or min(os.cpu_count() or 1, _MOST_THREADS)
        self._usual = _FairThreads(usual, "tokenizer")
        self._enormous = _FairThreads(1, "tokenizer-enormous")

    async def run(self, call: Callable[[], Result], texts: list[str], client: str) -> Result:
        """The result of `call`, which tokenises these texts of a client."""
        threads = self._enormous if await self._are_enormous(texts, client) else self._usual
        return await threads.run(call, client)

    async def _are_enormous(self, texts: list[str], client: str) -> bool:
        characters = sum(map(len, texts))
        if characters > _ENORMOUS_CHARACTERS:
            return True
        if characters * GROWTHS[-1] <= _ENORMOUS_CHARACTERS or all(map(str.isascii, texts)):
            return False
        return await self._usual.run(partial(_become_enormous, texts), client)

    def close(self) -> None:
        """Forget what has not begun."""
        for threads in (self._usual, self._enormous):
            threads.close()


class _FairThreads:
    """Threads, of which a free one works for the waiting client that occupies the fewest."""

    def __init__(self, count: int, name: str) -> None:
        self._permits = FairSemaphore(count)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, call: Callable[[], Result], client: str) -> Result:
        """The result of `call`. A caller that leaves does not free its thread any sooner."""
        await self._permits.acquire(client)

        def free(done: "asyncio.Future[Result]") -> None:
            self._permits.release(client)
            if not done.cancelled():
                done.exception()  # Whoever asked for it may have left.

        running = asyncio.get_running_loop().run_in_executor(self._threads, call)
        running.add_done_callback(free)
        return await asyncio.shield(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _become_enormous(texts: list[str]) -> bool:
    """Whether normalisation makes more of the texts than a second's work."""
    return sum(map(_normalized_characters, texts)) > _ENORMOUS_CHARACTERS


def _normalized_characters(text: str) -> int:
    """An upper bound, but for the few that others than ligatures may grow by."""
    parts = (text[i : i + _GLANCE_CHARACTERS] for i in range(0, len(text), _GLANCE_CHARACTERS))
    return sum(len(part) * (GROWTHS[-1] if growth_of(part) == GROWTHS[-1] else 1) for part in parts)


def growth_of(text: str) -> int:
    """The most characters that normalisation makes of one of `text`: one of `GROWTHS`.

    Under NFC, NFD, NFKC and NFKD alike; those characters have at most four bytes for each of this
    number, in UTF-8.
    """
    if text.isascii():
        return 1
    return 18 if _LIGATURES.search(text) else 4
