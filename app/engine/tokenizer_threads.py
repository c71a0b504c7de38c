"""Threads for tokenisers: enormous texts have one of their own, so that they hold up no others."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

_MOST_THREADS = 8
# About a second's work.
_ENORMOUS_CHARACTERS = 1_000_000


class TokenizerThreads:
    """`count` threads for requests of usual size, and one for those that take seconds."""

    def __init__(self, count: int | None) -> None:
        usual = count or min(os.cpu_count() or 1, _MOST_THREADS)
        self._usual = ThreadPoolExecutor(usual, thread_name_prefix="tokenizer")
        self._enormous = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-enormous")

    async def run(self, call: Callable[[], Result], characters: int) -> Result:
        """The result of `call`, which tokenises so many characters."""
        threads = self._enormous if characters > _ENORMOUS_CHARACTERS else self._usual
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    def close(self) -> None:
        """Forget what has not begun."""
        for threads in (self._usual, self._enormous):
            threads.shutdown(wait=False, cancel_futures=True)
