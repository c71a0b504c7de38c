"""Runs the tests in several processes, which are forked when everything is imported and collected.

That takes a processor 10 seconds, and pytest-xdist would do it in each of its processes. The tests
of a file run in one process and in their order, as they share a module's fixtures; a process that
has run its files is given the next one. A test whose process ends fails, and another goes on.
"""

import os
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

# In their environment.
NUMBER = "PROCESS_OF_THE_TESTS"
# The status of one in which something else than a test has raised an error.
_BROKEN = 70


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "run the tests in so many processes, each file in one of them"
    parser.addoption("--processes", type=int, default=0, help=told)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in processes, where there are to be some, and report them here."""
    count = session.config.getoption("processes")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    Processes(session).run(count)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


@dataclass(eq=False, slots=True)
class Process:
    """`left` are the places of its tests that have not ended; the first one may be running."""

    pid: int
    left: list[int] = field(default_factory=list)


class Processes:
    """The files that no process has yet, as places of tests, and the processes."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._hook = session.config.hook
        session.config._tmp_path_factory.getbasetemp()  # Made here: theirs are in it.
        files: dict[Path, list[int]] = {}
        for place, item in enumerate(session.items):
            files.setdefault(item.path, []).append(place)
        self._files = deque(files.values())
        self._running: dict[Connection, Process] = {}
        self._started = 0

    def run(self, count: int) -> None:
        """Start so many, and follow what they tell until the last one has ended."""
        try:
            for _ in range(count):
                self._start()
            while self._running:
                for told in wait(list(self._running)):
                    self._follow(told)
        finally:
            for connection, process in self._running.items():
                connection.close()  # By which it is told to end.
                os.waitpid(process.pid, 0)

    def _start(self) -> None:
        self._started += 1
        ours, theirs = Pipe()
        pid = os.fork()
        if not pid:
            for other in (ours, *self._running):
                other.close()
            _become_a_process(self._session, theirs, self._started)
        theirs.close()
        self._running[ours] = Process(pid)

    def _follow(self, connection: Any) -> None:
        process = self._running[connection]
        try:
            kind, told = connection.recv()
        except (EOFError, ConnectionResetError):
            self._ended(connection)
            return
        if kind == "report":
            config = self._session.config
            report = self._hook.pytest_report_from_serializable(config=config, data=told)
            self._hook.pytest_runtest_logreport(report=report)
        elif kind == "end":
            process.left.remove(told)
            self._finish(told)
        else:
            places = self._files.popleft() if self._files and not self._stops else []
            process.left += places
            connection.send(places)

    @property
    def _stops(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _finish(self, place: int) -> None:
        item = self._session.items[place]
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _ended(self, connection: Connection) -> None:
        process = self._running.pop(connection)
        connection.close()
        _, status = os.waitpid(process.pid, 0)
        told = f"its process ended with the status {os.waitstatus_to_exitcode(status)}"
        if status and (not process.left or os.waitstatus_to_exitcode(status) == _BROKEN):
            raise RuntimeError(f"beside the tests {told}")
        if not process.left or self._stops:
            return
        place, *rest = process.left
        item = self._session.items[place]
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", told, "call")
        self._hook.pytest_runtest_logreport(report=report)
        self._finish(place)
        if rest:
            self._files.appendleft(rest)
        self._start()


def _become_a_process(session: pytest.Session, connection: Connection, number: int) -> NoReturn:
    """Run what is given, end all fixtures, and end."""
    status = _BROKEN
    try:
        _take_what_is_shared(session.config, number)
        session.config.pluginmanager.register(_Teller(session.config, connection))
        try:
            _run(session, connection)
        finally:
            session.config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
            session.config._ensure_unconfigure()
        status = 0
    except BaseException:  # noqa: BLE001 - nothing is above
        session.config.pluginmanager.get_plugin("capturemanager").stop_global_capturing()
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _take_what_is_shared(config: pytest.Config, number: int) -> None:
    """Have a folder and files for captured output of its own, and leave the terminal alone."""
    os.environ[NUMBER] = str(number)
    folders = config._tmp_path_factory
    folders._basetemp = folders.getbasetemp() / f"process-{number}"
    folders._basetemp.mkdir(mode=0o700)
    plugins = config.pluginmanager
    capture = plugins.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    reporter = plugins.unregister(name="terminalreporter")
    plugins.register(_Terminal(reporter._tw), "terminalreporter")


@dataclass(eq=False)
class _Terminal:
    """Where a test that takes too long shows its stacks."""

    _tw: Any


@dataclass(eq=False)
class _Teller:
    config: pytest.Config
    connection: Connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", told))


def _given(connection: Connection) -> Iterator[int]:
    """Places of tests, file by file."""
    while True:
        connection.send(("next", None))
        places = connection.recv()
        if not places:
            return
        yield from places


def _run(session: pytest.Session, connection: Connection) -> None:
    # A fixture ends where the next test does without it, which therefore must be known before.
    for place, after in pairwise(chain(_given(connection), [None])):
        item, following = session.items[place], None if after is None else session.items[after]
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        connection.send(("end", place))
        if session.shouldfail or session.shouldstop:
            return
