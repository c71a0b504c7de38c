"""Which tests run which lines of smart_embedder/, in their process and in servers that they start.

    python -m scripts.test_lines --folder /tmp/mutation --jobs 2

Needs coverage.py (pip install coverage) beside the tests' environment. It copies the working tree
into FOLDER in parts, runs the tests of smart_embedder and of tests/faults there once, and writes
FOLDER/lines-*.json for `scripts.mutate`. Each line is noted with the tests during which it ran: a
server that many tests share is told by a file which of them is running. What ran while a test was
set up counts for all tests of its file, and for all that share the session's server.
"""

import argparse
import atexit
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest

from scripts.mutants import copy_tree, test_files

ROOT = Path(__file__).resolve().parents[1]
CURRENT = "current-test"
DATA = ".lines"
# A server looks for the next test this often, and a test starts only after so long.
PAUSE = 0.002
NOTICE = 0.005
SHARED_SERVER = "server"
SERVERS_START_WITH = "from scripts.test_lines import follow\nfollow()\n"


def _started(kind: str) -> coverage.Coverage:
    """Coverage of this process's smart_embedder/; `kind` begins the names of its files."""
    (ROOT / DATA).mkdir(exist_ok=True)
    measured = coverage.Coverage(
        data_file=str(ROOT / DATA / kind),
        data_suffix=True,
        config_file=False,
        include=[f"{ROOT}/smart_embedder/*"],
        messages=False,
    )
    measured.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
    measured.start()
    return measured


def follow() -> None:
    """In a server's process: note lines for the test that CURRENT tells, as long as it runs."""
    measured = _started("server")

    def watch() -> None:
        shown, turns = b"", 0
        with (ROOT / CURRENT).open("rb") as current:
            while True:
                now = os.pread(current.fileno(), 8, 0)
                turns += 1
                # Also now and then, for a process that will be killed.
                if now != shown or turns % 100 == 0:
                    shown = now
                    measured.switch_context(now.decode())
                time.sleep(PAUSE)

    def start() -> None:
        threading.Thread(target=watch, daemon=True).start()

    if "tests.support.template" in sys.orig_argv:
        os.register_at_fork(after_in_child=start)
    else:
        start()
    atexit.register(measured.save)


@dataclass(eq=False)
class Notes:
    """The plugin of the process that runs the tests."""

    tests: list[str] = field(default_factory=list)
    sharing: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    failed: set[str] = field(default_factory=set)
    measured: coverage.Coverage = field(default_factory=lambda: _started("tests"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[Any]:
        """Tell everyone that this test is set up, and then that it runs."""
        number = len(self.tests)
        self.tests.append(item.nodeid)
        if SHARED_SERVER in getattr(item, "fixturenames", ()):
            self.sharing.append(item.nodeid)
        self._tell(f"s{number:7}")
        try:
            return (yield)
        finally:
            self._tell(f"{number:8}")

    def _tell(self, number: str) -> None:
        (ROOT / CURRENT).write_text(number)
        time.sleep(NOTICE)
        self.measured.switch_context(number)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how long it took and whether it failed or was left out."""
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def write(self) -> None:
        """Save all of it where `collect` reads it."""
        self.measured.stop()
        self.measured.save()
        notes = {"tests": self.tests, "seconds": self.seconds, "failed": sorted(self.failed)}
        (ROOT / DATA / "notes.json").write_text(json.dumps(notes | {"sharing": self.sharing}))


def run_tests(arguments: list[str]) -> int:
    """In a copy: run these tests and note their lines."""
    (ROOT / CURRENT).write_text(" " * 8)
    (ROOT / "sitecustomize.py").write_text(SERVERS_START_WITH)
    notes = Notes()
    status = pytest.main(["-q", "-o", "timeout=0", *arguments], plugins=[notes])
    notes.write()
    return int(status)


def _tests_of(context: str, notes: dict[str, Any], files: dict[str, set[str]]) -> set[str]:
    """The tests that a context of a line stands for."""
    if not context.strip():
        return set()
    test = notes["tests"][int(context.removeprefix("s"))]
    if not context.startswith("s"):
        return {test}
    return files[test.partition("::")[0]] | set(
        notes["sharing"] if test in notes["sharing"] else ()
    )


def collect(copy: Path, target: Path) -> None:
    """Put what a copy noted into one file, with the sources that the lines are of."""
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    with_server: set[str] = set()
    notes = json.loads((copy / DATA / "notes.json").read_text())
    files: dict[str, set[str]] = defaultdict(set)
    for test in notes["tests"]:
        files[test.partition("::")[0]].add(test)
    for path in (copy / DATA).glob("*.*.*"):
        data = coverage.CoverageData(str(path))
        data.read()
        for file in data.measured_files():
            of_file = lines[str(Path(file).relative_to(copy))]
            for line, contexts in data.contexts_by_lineno(file).items():
                tests = set().union(*(_tests_of(each, notes, files) for each in contexts))
                of_file[line] |= tests
                with_server |= tests if path.name.startswith("server") else set()
    numbers = {test: number for number, test in enumerate(notes["seconds"])}
    found = {
        "seconds": notes["seconds"],
        "failed": notes["failed"],
        "with_server": sorted(with_server),
        "tests": list(numbers),
        "lines": {
            file: {line: sorted(numbers[test] for test in tests) for line, tests in known.items()}
            for file, known in sorted(lines.items())
        },
        "sources": {file: (copy / file).read_text() for file in lines},
    }
    target.write_text(json.dumps(found))
    print(f"{len(numbers)} tests, {len(notes['failed'])} of them failed or left out: {target}")


def run_part(folder: Path, number: int, files: list[str]) -> None:
    """Run some test files in a copy of their own, and collect what it notes."""
    copy = folder / f"lines-{number}"
    copy_tree(ROOT, copy)
    start = "import sys; from scripts.test_lines import run_tests; run_tests(sys.argv[1:])"
    with (folder / f"{copy.name}.log").open("w") as log:
        command = [sys.executable, "-c", start, *files]
        subprocess.run(command, cwd=copy, stdout=log, stderr=log, check=False)
    if (copy / DATA / "notes.json").exists():
        collect(copy, folder / f"{copy.name}.json")
    else:  # A tracer and a thread that is killed do not go together.
        print(f"ended before its notes were written, see {copy.name}.log: {', '.join(files)}")
    shutil.rmtree(copy)


def main() -> None:
    """Copy the tree, run the tests in each copy, collect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for the copies and the result")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--parts", type=int, default=24, help="in which the test files are run")
    parser.add_argument("files", nargs="*", help="test files; by default all of smart_embedder's")
    arguments = parser.parse_args()
    files = arguments.files or test_files(ROOT)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for number in range(min(arguments.parts, len(files))):
            part = files[number :: arguments.parts]
            pool.submit(run_part, arguments.folder, number, part)


if __name__ == "__main__":
    main()
