"""Runs tests against a planted fault, in copies of a process that has imported and collected them.

A run with a fault in a function is a copy of a process that has collected all tests: the function's
code is replaced there, and servers that the tests start read the changed file. Where what is
changed runs on import, the copy is of a process that has not imported it yet.

A test hangs when nothing of it has wanted a processor for `MOST_IDLE_LOOKS`, or when it has taken
ten times its processor time and `MOST_SECONDS` more. Both are counted in looks at it, so that a
time in which all of this was stopped, or got no processor, decides nothing.
"""

import ast
import compileall
import ctypes
import gc
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from py_compile import PycInvalidationMode
from types import CodeType, FunctionType

import psutil
import pytest
import torch

from scripts.mutants import Mutant, copy_tree, test_files

SECONDS_BETWEEN_LOOKS = 0.1
MOST_IDLE_LOOKS = 150
MOST_SECONDS = 20.0
NEVER_SLOWER = 10
# Looks further apart than this were held up: by a signal, or by other work.
HELD_UP = 2.0
_OPTIONS = ("-q", "-s", "-o", "timeout=0", "-W", "ignore::pytest.PytestAssertRewriteWarning")
_ORPHANS_COME_HERE = 36  # prctl's PR_SET_CHILD_SUBREAPER

Patches = list[tuple[FunctionType, CodeType]]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run of tests ended: `test` failed or hung first, or none did."""

    test: str = ""
    hung: bool = False
    held_up: bool = False


@dataclass(eq=False)
class Runner:
    """Runs tests in a copy of the working tree, in which faults are planted; a pytest plugin, too.

    `seconds` tells how long a test usually takes, `with_server` which of them start servers.
    """

    source: Path
    folder: Path
    seconds: dict[str, float]
    with_server: set[str]
    bad: set[str] = field(default_factory=set)
    items: dict[str, pytest.Item] = field(default_factory=dict)
    _functions: dict[tuple[str, str, int], list[FunctionType]] = field(default_factory=dict)
    _originals: dict[str, bytes] = field(default_factory=dict)
    _chosen: set[str] | None = None
    _failed: bool = False
    _work: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.root = self.folder.resolve() / "tree"
        self._progress = self.folder.resolve() / "progress"
        self._collected = self.folder.resolve() / "collected"
        shutil.rmtree(self.root, ignore_errors=True)
        copy_tree(self.source, self.root)
        # Compiled once: a changed file is told by its contents, as two changes may share a second.
        by_contents = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.root / "smart_embedder", quiet=1, invalidation_mode=by_contents)
        ctypes.CDLL(None).prctl(_ORPHANS_COME_HERE, 1)

    def with_all_collected(self, work: Callable[[], None]) -> None:
        """In a copy of this process that has collected the tests: do the work."""
        child = os.fork()
        if not child:
            self._work = work
            # Threads of PyTorch's would not be copied.
            torch.set_num_threads(1)
            self._run_pytest(test_files(self.root))
        os.waitpid(child, 0)

    @property
    def collected(self) -> list[str]:
        """All tests."""
        return self._collected.read_text().splitlines()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Do the work in the place of running all tests."""
        if self._chosen is not None:
            return None
        self.items = {item.nodeid: item for item in session.items}
        self._collected.write_text("\n".join(self.items))
        # `isinstance` would ask proxies for what they stand for, and some of them warn.
        functions = [each for each in gc.get_objects() if type(each) is FunctionType]
        for each in functions:
            code = each.__code__
            if code.co_filename.startswith(f"{self.root}/smart_embedder/"):
                key = (code.co_filename, code.co_qualname, code.co_firstlineno)
                self._functions.setdefault(key, []).append(each)
        gc.collect()
        gc.freeze()
        self._work()
        return True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell that it starts."""
        self._tell("started", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell that it failed."""
        if report.failed:
            self._failed = True
            self._tell("failed", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Tell that a file cannot even be imported."""
        if report.failed:
            self._tell("failed", report.nodeid)

    def _tell(self, what: str, nodeid: str) -> None:
        with self._progress.open("a") as file:
            file.write(f"{what} {nodeid}\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Where only some are run: keep those."""
        if self._chosen is not None:
            items[:] = [each for each in items if each.nodeid in self._chosen]

    def original(self, mutant: Mutant) -> bytes:
        """Its file without the fault."""
        if mutant.file not in self._originals:
            self._originals[mutant.file] = (self.root / mutant.file).read_bytes()
        return self._originals[mutant.file]

    def can_plant(self, mutant: Mutant) -> bool:
        """Whether the fault can be planted in a process that has imported its module."""
        return self._patches(mutant) is not None

    def _patches(self, mutant: Mutant) -> Patches | None:
        """The functions to change, and their new code; None where what is changed has run."""
        path = str(self.root / mutant.file)
        if mutant.module not in sys.modules:
            return []
        original = self.original(mutant)
        changed = mutant.applied_to(original)
        found = outermost_function(ast.parse(original), mutant)
        if found is None:
            return None
        code = _code_of(compile(changed, path, "exec"), *found)
        functions = self._functions.get((path, *found), [])
        if code is None or any(each.__code__.co_freevars != code.co_freevars for each in functions):
            return None
        return [(each, code) for each in functions] or None

    def notices(self, mutant: Mutant, tests: Iterable[str]) -> Ended:
        """The first of the tests that fails with the fault, and again where that is doubtful."""
        path, source = self.root / mutant.file, self.original(mutant)
        path.write_bytes(mutant.applied_to(source))
        try:
            while "::" in (ended := self.run(tests, mutant)).test:
                if not (ended.held_up or ended.test in self.with_server):
                    break
                if self.run([ended.test], mutant).test:
                    break
                self.bad.add(ended.test)
            return ended
        finally:
            path.write_bytes(source)

    def failing(self, tests: Iterable[str]) -> set[str]:
        """Those that fail without a fault."""
        self.run(tests, stop=False)
        return set(re.findall(r"^failed (.*)$", self._progress.read_text(), re.MULTILINE))

    def run(
        self, tests: Iterable[str], mutant: Mutant | None = None, *, stop: bool = True
    ) -> Ended:
        """Run tests in this order in a copy of this process, with a fault or none."""
        chosen = [test for test in tests if test not in self.bad]
        if not chosen:
            return Ended()
        self._progress.write_text("")
        child = os.fork()
        if not child:
            self._become_tests(chosen, mutant, stop)
        try:
            return self._watch(child)
        finally:
            _end_children()
            shutil.rmtree(self.folder / "tmp", ignore_errors=True)

    def _become_tests(self, chosen: list[str], mutant: Mutant | None, stop: bool) -> None:
        """In the copy: run the tests, and end."""
        torch.set_num_threads(os.cpu_count() or 1)
        if not self.items:
            self._chosen = set(chosen)
            files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
            self._run_pytest([*files, *(["-x"] if stop else [])])
        status = 3
        try:
            for function, code in (mutant and self._patches(mutant)) or ():
                function.__code__ = code
            items = [self.items[test] for test in chosen if test in self.items]
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self._failed and stop:
                    break
            items[0].session._setupstate.teardown_exact(None)  # noqa: SLF001 - ends the servers
            status = 0
        finally:
            os._exit(status)

    def _run_pytest(self, arguments: list[str]) -> None:
        """In a copy of the first process: pytest, with this as a plugin; then end."""
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(self.root)
        sys.path[:] = [str(self.root), *(each for each in sys.path if Path(each) != self.source)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
            del sys.modules[name]
        sys.dont_write_bytecode = True
        status = 3
        try:
            basetemp = f"--basetemp={self.folder.resolve() / 'tmp'}"
            status = pytest.main([*_OPTIONS, basetemp, *arguments], plugins=[self])
        finally:
            os._exit(status)

    def _watch(self, child: int) -> Ended:
        """Wait for the tests' end; tell where one of them hangs."""
        test, size, idle, held_up = "the start", 0, 0, False
        before, last = 0.0, time.monotonic()
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(SECONDS_BETWEEN_LOOKS)
            held_up |= time.monotonic() - last > HELD_UP
            last = time.monotonic()
            spent, wants = _processor_time()
            idle = 0 if wants else idle + 1
            if self._progress.stat().st_size != size:
                size, idle, before = self._progress.stat().st_size, 0, spent
                test = self._progress.read_text().splitlines()[-1].partition(" ")[2]
            usual = self.seconds.get(test, 2.0)
            too_idle = idle > MOST_IDLE_LOOKS + 3 * usual / SECONDS_BETWEEN_LOOKS
            if too_idle or spent - before > MOST_SECONDS + NEVER_SLOWER * usual:
                return Ended(test, hung=True, held_up=held_up)
        failed = re.search(r"^failed (.*)$", self._progress.read_text(), re.MULTILINE)
        if failed:
            return Ended(failed[1], held_up=held_up)
        passed = os.waitstatus_to_exitcode(status) in {0, pytest.ExitCode.NO_TESTS_COLLECTED}
        return Ended("" if passed else test, held_up=held_up)


def outermost_function(module: ast.Module, mutant: Mutant) -> tuple[str, int] | None:
    """The qualified name and first line of the function in whose body the fault is."""
    body: list[ast.stmt] = module.body
    names: list[str] = []
    while True:
        inside = [
            each
            for each in body
            if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and each.body[0].lineno <= mutant.line <= (each.end_lineno or 0)
        ]
        if not inside:
            return None
        names.append(inside[0].name)
        if not isinstance(inside[0], ast.ClassDef):
            decorators = inside[0].decorator_list
            return ".".join(names), (decorators or inside)[0].lineno
        body = inside[0].body


def _code_of(code: CodeType, name: str, line: int) -> CodeType | None:
    """The code of that function in a module's."""
    if (code.co_qualname, code.co_firstlineno) == (name, line):
        return code
    inner = (_code_of(each, name, line) for each in code.co_consts if isinstance(each, CodeType))
    return next((each for each in inner if each), None)


def _processor_time() -> tuple[float, bool]:
    """What this process's children have used, and whether one of them wants more."""
    spent, wants = 0.0, False
    for each in psutil.Process().children(recursive=True):
        for thread in Path(f"/proc/{each.pid}/task").glob("*/stat"):
            with suppress(OSError):
                state, *fields = thread.read_text().rpartition(") ")[2].split()
                spent += (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
                wants |= state in "RDT"
    return spent, wants


def _end_children() -> None:
    """End the tests and all that they started, also what outlived them."""
    while children := psutil.Process().children(recursive=True):
        for each in children:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
