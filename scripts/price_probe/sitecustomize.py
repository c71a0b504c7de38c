"""Python imports this at the start of the process that `scripts.price` measures.

It shares the file that PRICE_PROBE names with the script, which reads two doubles: the longest time
of the processor that the event loop's thread took for one turn, and the longest time without a turn
in which it did not wait for a processor (nor more than the whole process's processor time, so that
a busy machine does not count): another thread had Python's lock. Behind them stands a stack of the
loop's thread in the longest one. The script sets all of it to zero. It asks with the last byte for
free memory to be given back, and for the ids of the devices' threads. The byte before counts ticks.
"""

import asyncio
import ctypes
import mmap
import os
import struct
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from smart_embedder.observability.loop_watch import frames_of_threads

SIZE, TRIM_AT, STACK_AT = 4096, 4095, 16
THREADS_AT, THREADS, TICKS_AT = 3960, "16q", 4094
_TICK_SECONDS, _LOOK_SECONDS, _LONG_SECONDS = 0.004, 0.02, 0.03
_FRAMES = 4


class _Probe:
    """Ticks on a loop; a thread looks at what the loop does while the tick is late."""

    def __init__(self, seen: mmap.mmap) -> None:
        self._seen = seen
        self._thread = 0
        self._last = (0.0, 0.0, 0.0, 0.0)
        self._longest_look = 0.0

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._thread = threading.get_ident()
        path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._waits = path.open("rb", buffering=0)
        threading.Thread(target=self._look, daemon=True).start()
        self._next(loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._last = self._times()
        loop.call_later(_TICK_SECONDS, self._tick, loop)

    def _times(self) -> tuple[float, float, float, float]:
        """By the clock; of the process, of this thread, and in which it waited for a processor."""
        self._waits.seek(0)
        queued = int(self._waits.read().split()[1]) / 1e9
        return time.monotonic(), time.process_time(), time.thread_time(), queued

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        passed = (a - b for a, b in zip(self._times(), self._last, strict=True))
        wall, process, thread, queued = passed
        for place, seconds in ((0, thread), (8, min(wall - _TICK_SECONDS - queued, process))):
            if seconds > struct.unpack_from("d", self._seen, place)[0]:
                struct.pack_into("d", self._seen, place, seconds)
        self._seen[TICKS_AT] = (self._seen[TICKS_AT] + 1) % 256
        if self._seen[TRIM_AT]:
            ctypes.CDLL(None).malloc_trim(0)
            threads = [each for each in threading.enumerate() if each.name.startswith("device")]
            ids = [each.native_id or 0 for each in threads] + [0] * 16
            struct.pack_into(THREADS, self._seen, THREADS_AT, *ids[:16])
            self._seen[TRIM_AT] = 0
        self._next(loop)

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            late = time.monotonic() - self._last[0]
            if not self._seen[STACK_AT]:  # It was set to zero.
                self._longest_look = 0.0
            if late > max(_LONG_SECONDS, self._longest_look):
                frame = frames_of_threads().get(self._thread)
                stack = traceback.extract_stack(frame)[-_FRAMES:]
                names = " > ".join(f"{Path(each.filename).stem}.{each.name}" for each in stack)
                raw = names.encode()[: THREADS_AT - STACK_AT - 1] + b"\0"
                self._seen[STACK_AT : STACK_AT + len(raw)] = raw
                self._longest_look = late


def _begun(run: Callable[..., Any], probe: _Probe) -> Callable[..., Any]:
    def run_until_complete(loop: asyncio.AbstractEventLoop, future: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            loop.call_soon(probe.begin, loop)
        return run(loop, future)

    return run_until_complete


if "PRICE_PROBE" in os.environ:
    with Path(os.environ["PRICE_PROBE"]).open("r+b") as file:
        probe = _Probe(mmap.mmap(file.fileno(), SIZE))
    loops: tuple[Any, ...] = (asyncio.BaseEventLoop, uvloop.Loop)
    for each in loops:
        each.run_until_complete = _begun(each.run_until_complete, probe)
