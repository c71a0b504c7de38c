"""The threads of the kernels: which of them enter a region, and what they do afterwards."""

import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from smart_embedder.kernels.build import library_path

_TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# Nanoseconds of work for which sleeping threads are woken.
_LARGE = 10**9
_PATIENCE = 500.0

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the kernels are not built")


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """A separate handle of the library."""
    library = ctypes.CDLL(str(library_path()))
    library.on_threads.argtypes = [ctypes.c_int, ctypes.c_long, _TASK, ctypes.c_void_p]
    library.set_watch.argtypes = [ctypes.c_long]
    return library


def run(library: ctypes.CDLL, threads: int, task: Callable[[], None]) -> None:
    """Run a region with this task; raise the first error that the task raises."""
    errors = []

    def guarded(_: object) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - none may pass through C
            errors.append(error)

    library.on_threads(threads, _LARGE, _TASK(guarded), None)
    if errors:
        raise errors[0]


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; fail after 30 seconds."""
    until = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < until, "the condition never held"
        os.sched_yield()


def helper_of(library: ctypes.CDLL) -> int:
    """Return the system's id of the second thread in the calling thread's team."""
    caller, found, came = threading.get_native_id(), [], threading.Event()

    def task() -> None:
        if threading.get_native_id() == caller:
            assert came.wait(_PATIENCE)
        else:
            found.append(threading.get_native_id())
            came.set()

    run(library, 2, task)
    return found[0]


def of_thread(number: int, field: str) -> str:
    """Read a field of a thread's status in /proc."""
    lines = Path(f"/proc/self/task/{number}/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(field))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_do_each_part_of_the_work_once(library, threads: int) -> None:
    for _ in range(50):
        parts, done = count(), Counter()

        def task(parts=parts, done=done) -> None:
            while (part := next(parts)) < 40:
                done[part] += 1

        run(library, threads, task)
        assert done == dict.fromkeys(range(40), 1)


def test_region_uses_at_most_the_given_number_of_threads(library) -> None:
    helper_of(library)
    for threads in (4, 2, 1, 3):
        seen = set()
        for _ in range(50):
            run(library, threads, lambda seen=seen: seen.add(threading.get_native_id()))
        assert len(seen) <= threads


def test_region_waits_for_the_threads_that_entered(library) -> None:
    caller, came, left = threading.get_native_id(), threading.Event(), []

    def task() -> None:
        if threading.get_native_id() == caller:
            assert came.wait(_PATIENCE)
        else:
            came.set()
            # Leave after the calling thread has closed the region and sleeps.
            wait_until(lambda: of_thread(caller, "State").startswith("S"))
            left.append(True)

    run(library, 2, task)
    assert left == [True]


@pytest.mark.parametrize("watch", [200_000, 0], ids=["watching", "not watching"])
def test_thread_sleeps_if_no_region_follows(library, watch: int) -> None:
    library.set_watch(watch)
    try:
        helper = helper_of(library)
        wait_until(lambda: of_thread(helper, "State").startswith("S"))
        assert helper_of(library) == helper
    finally:
        library.set_watch(200_000)


def test_team_ends_with_its_calling_thread(library) -> None:
    helpers = []
    thread = threading.Thread(target=lambda: helpers.append(helper_of(library)))
    thread.start()
    thread.join()
    wait_until(lambda: not Path(f"/proc/self/task/{helpers[0]}").exists())


def test_kernel_threads_block_signals(library) -> None:
    blocked = int(of_thread(helper_of(library), "SigBlk"), 16)
    for signal in (1, 2, 10, 15):  # SIGHUP, SIGINT, SIGUSR1, SIGTERM
        assert blocked >> (signal - 1) & 1


def test_concurrent_callers_have_separate_teams(library) -> None:
    together, found = threading.Barrier(4, timeout=_PATIENCE), []

    def call() -> None:
        together.wait()
        found.append(helper_of(library))
        together.wait()

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(set(found)) == 4


def test_forked_child_starts_its_own_threads(library) -> None:
    helper_of(library)
    child = os.fork()
    if not child:
        found = []
        try:
            found.append(helper_of(library))
        finally:
            os._exit(0 if found else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
