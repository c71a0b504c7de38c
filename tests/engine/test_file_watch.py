"""Watching the models' files: nothing is asked on the event loop, and a change is told once."""

import asyncio
import threading

import pytest

from app.engine import file_watch
from app.engine.file_watch import FileWatch


class Files:
    """Files of which one changes when told to."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.now: str | None = None
        self.asked_on: set[str] = set()
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def changed(self) -> str | None:
        self.asked_on.add(threading.current_thread().name)
        self._loop.call_soon_threadsafe(self.asked.set)
        return self.now


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watch, "_SECONDS", 0.001)


async def test_a_change_is_told_and_then_nothing_asked_any_more() -> None:
    files, watch = Files(["m3/model.safetensors"]), FileWatch()
    watch.start(files)
    await files.asked.wait()
    assert watch.problem is None
    files.now = "m3/model.safetensors"
    task = watch._task
    assert task is not None
    await task
    assert watch.problem is not None
    assert watch.problem.startswith("the file m3/model.safetensors was written to")
    assert threading.main_thread().name not in files.asked_on
    await watch.close()


async def test_where_nothing_is_mapped_nothing_is_asked() -> None:
    files, watch = Files([]), FileWatch()
    watch.start(files)
    await watch.close()
    assert not files.asked.is_set()


async def test_one_that_was_never_started_can_be_closed() -> None:
    await FileWatch().close()
