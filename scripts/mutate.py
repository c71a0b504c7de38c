"""How many small faults does the suite notice? The faults are those of `scripts.mutants`.

    python -m scripts.test_lines --folder /tmp/mutation --jobs 2
    python -m scripts.mutate run --folder /tmp/mutation --seed 1 --count 300
    python -m scripts.mutate report /tmp/mutation/1.jsonl

Each fault is planted in a copy of the working tree, never in the tree itself. First the tests that
mirror the file look for it: of tests/api/test_body*.py for api/body.py, or where there is no such
file of tests/api, those that run the line; then the others that run it. Of the others the
quickest are asked, as many as take `--seconds`, and of the mirrored five times as many. Kinds of
faults are drawn with the weight of the square root of how many there are, and the faults of a kind
at random; the same seed draws the same from the same sources. Results are appended to
FOLDER/SEED.jsonl, and a run goes on where the last one stopped: without the notes of
`scripts.test_lines` only a module's own test files are asked, and `--without-servers` no tests that
start one; a later run asks those.

How tests are run against a fault, and what counts as a hang, says `scripts.mutant_runs`. A failure
of a test with a server, or after a time in which this run got no processor, must happen twice; and
what failed is run without any fault at the end: a test that fails there, too, has noticed nothing.

Needs the tests' environment on Linux, and coverage.py for the first command.
"""

import argparse
import ast
import difflib
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.mutant_runs import Ended, Runner, outermost_function
from scripts.mutants import Mutant, draw, mutants_below

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", "GOMP_SPINCOUNT": "2000"}
# A module's own tests are asked for so many times the seconds of the others.
_MIRRORED_SHARE = 5
# Everything that these import, but what is in the tree, is imported once for all runs.
WARM_UP = ("tests/api/test_rendering.py", "tests/models/tasks/test_dense_m3.py")
IN_THE_TREE = {"smart_embedder", "benchmark", "benchmarks", "scripts", "tests", "tools", "__main__"}
IMPORTED = """
import sys, pytest
pytest.main(["-q", *sys.argv[1:]])
import smart_embedder.main, smart_embedder.models.loader, smart_embedder.server.process
print("imported:", *sys.modules)
"""


class Lines:
    """Which tests run which lines: what `scripts.test_lines` wrote, for the present sources."""

    def __init__(self, folder: Path) -> None:
        notes = [json.loads(path.read_text()) for path in sorted(folder.glob("lines-*.json"))]
        self.known = bool(notes)
        self.seconds: dict[str, float] = {}
        self.with_server: set[str] = set()
        self._failing: set[str] = set()
        for each in notes:
            self.seconds |= each["seconds"]
            self.with_server.update(each["with_server"])
            self._failing.update(each["failed"])
        self._notes = notes

    def cost(self, test: str) -> tuple[bool, str, float]:
        """By it tests are sorted: the quick ones first, those of a file together."""
        return test in self.with_server, test.partition("::")[0], self.seconds.get(test, 0.0)

    def tests_of(self, mutant: Mutant, now: str) -> set[str]:
        """Those that run its statement, in the file as it is `now`.

        Where it runs on import, that is, for whoever is first, all that run any of the file.
        """
        tests: set[str] = set()
        on_import = outermost_function(ast.parse(now), mutant) is None
        for notes in self._notes:
            of_file = notes["lines"].get(mutant.file, {})
            then = _then(notes["sources"].get(mutant.file, ""), now)
            lines = [str(then.get(line)) for line in range(mutant.first, mutant.last + 1)]
            known = [of_file[line] for line in lines if line in of_file]
            if known and (on_import or not any(known)):
                known = list(of_file.values())
            tests.update(notes["tests"][number] for numbers in known for number in numbers)
        return tests - self._failing


@cache
def _then(then: str, now: str) -> dict[int, int]:
    """For each line that has stayed: its number then by its number now."""
    matcher = difflib.SequenceMatcher(None, then.splitlines(), now.splitlines(), autojunk=False)
    return {
        block.b + step + 1: block.a + step + 1
        for block in matcher.get_matching_blocks()
        for step in range(block.size)
    }


def mirrored_files(file: str) -> list[str]:
    """The test files of a module; where it has none of its own, those of its folder.

    A folder's are tests/api/formats/test_*.py, or tests/api/test_formats.py.
    """
    folder = Path("tests", *Path(file).parts[1:-1])
    found = [*(ROOT / folder).glob("test_*.py"), ROOT / folder.parent / f"test_{folder.name}.py"]
    names = sorted(str(each.relative_to(ROOT)) for each in found if each.exists())
    return [each for each in names if _is_of(each, file)] or names


def has_own_tests(file: str) -> bool:
    """Whether a module has a test file of its own."""
    return any(_is_of(each, file) for each in mirrored_files(file))


def _is_of(test_file: str, file: str) -> bool:
    own, name = f"test_{Path(file).stem}", Path(test_file).stem
    return name == own or name.startswith(f"{own}_")


def quickest(tests: set[str], lines: Lines, seconds: float) -> list[str]:
    """As many as take so long: in turns one of each file, the quickest first."""
    files: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests, key=lambda each: lines.seconds.get(each, 0.0)):
        files[test.partition("::")[0]].append(test)
    turns = sorted(
        (turn, lines.seconds.get(test, 0.0), test)
        for members in files.values()
        for turn, test in enumerate(members)
    )
    chosen: list[str] = []
    for _, took, test in turns:
        if seconds - took >= 0:
            chosen.append(test)
            seconds -= took
    # The tests of a file together: they share what is set up for them.
    order = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
    return sorted(chosen, key=lambda test: order.index(test.partition("::")[0]))


@dataclass
class Search:
    """Looks for the tests that notice faults, and writes down which do."""

    runner: Runner
    lines: Lines
    target: Path
    limit: float
    servers: bool

    def examine(self, mutants: list[Mutant]) -> None:
        """Find out, for those that can be planted now and are not known yet."""
        for mutant in mutants:
            before = self.known().get(mutant.name)
            all_asked = self.servers and self.lines.known
            if before and (before["by"] != "nobody" or before["all_asked"] >= all_asked):
                continue
            if self.runner.items and not self.runner.can_plant(mutant):
                continue
            if not self.lines.known and not has_own_tests(mutant.file):
                continue
            found = {"name": mutant.name} | asdict(mutant) | self._ask(mutant, bool(before))
            with self.target.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(f"{found['by']:8} {found['seconds']:6} {mutant.name}", file=sys.stderr)

    def known(self) -> dict[str, dict[str, Any]]:
        """What was found before."""
        return {each["name"]: each for each in results([self.target])}

    def _ask(self, mutant: Mutant, again: bool) -> dict[str, Any]:
        """The mirrored tests, then others; `again` only those that were not asked before."""
        lines, own = self.lines, mirrored_files(mutant.file)
        collected = set(self.runner.collected)
        # A test that is no longer there would fail to be found, with any fault.
        running = lines.tests_of(mutant, self.runner.original(mutant).decode()) & collected
        new = {test for test in collected if test not in lines.seconds}
        mirrored = {test for test in running | new if test.partition("::")[0] in own}
        stages = []
        for servers in (False, True)[: 2 if self.servers else 1]:
            for by, tests in (("mirrored", mirrored), ("others", running - mirrored)):
                kind = {each for each in tests if (each in lines.with_server) == servers}
                limit = self.limit * (_MIRRORED_SHARE if by == "mirrored" else 1)
                stages.append((by, quickest(kind, lines, limit)))
        stages.sort(key=lambda stage: stage[0])  # The mirrored first, of each the servers last.
        started, found = time.monotonic(), ("nobody", Ended())
        for by, asked in stages:
            if not found[1].test and not (again and asked and asked[0] not in lines.with_server):
                ended = self.runner.notices(mutant, asked)
                found = (by, ended) if ended.test else found
        return {
            "by": found[0],
            "hung": found[1].hung,
            "test": found[1].test,
            "running": len(running | mirrored),
            "left_out": len(running | mirrored) - sum(len(asked) for _, asked in stages),
            "all_asked": self.servers and lines.known,
            "seconds": round(time.monotonic() - started, 1),
        }

    def verify(self, mutants: list[Mutant]) -> None:
        """Ask again about faults that a test has noticed which fails without one."""
        known = self.known()
        noticed = {each["test"] for each in known.values() if each["test"] in self.runner.items}
        self.runner.bad |= self.runner.failing(sorted(noticed))
        again = {name for name, each in known.items() if each["test"] in self.runner.bad}
        if again:
            print(f"fail without a fault: {sorted(self.runner.bad)}", file=sys.stderr)
            kept = [json.dumps(each) + "\n" for name, each in known.items() if name not in again]
            self.target.write_text("".join(kept))
            self.examine(mutants)


def import_once(known: Path) -> None:
    """Import what is not in the tree: the runs are copies of this process."""
    if not known.exists():
        command = [sys.executable, "-c", IMPORTED, *WARM_UP]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        known.write_text(done.stdout.rpartition("imported:")[2])
    for name in known.read_text().split():
        if name.partition(".")[0] not in IN_THE_TREE:
            with suppress(ImportError):
                import_module(name)


def run(arguments: argparse.Namespace) -> None:
    """Draw faults and look which of them are noticed."""
    target = arguments.folder / f"{arguments.seed}.jsonl"
    target.touch()
    drawn = draw(mutants_below(ROOT, arguments.only), arguments.seed, arguments.count)
    lines = Lines(arguments.folder)
    os.environ.update(ENVIRONMENT)
    import_once(arguments.folder / "imported")
    job = next((job for job in range(1, arguments.jobs) if not os.fork()), 0)
    drawn = drawn[job :: arguments.jobs]
    runner = Runner(ROOT, arguments.folder / f"job-{job}", lines.seconds, lines.with_server)
    search = Search(runner, lines, target, arguments.seconds, not arguments.without_servers)

    def work() -> None:
        search.examine(drawn)
        search.verify(drawn)

    runner.with_all_collected(work)
    # What is left runs when the service is imported.
    search.examine(drawn)


def results(paths: list[Path]) -> list[dict[str, Any]]:
    """What runs have found: of each fault what was found last."""
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return list({each["name"]: each for each in map(json.loads, lines)}.values())


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    """A report: shares for each folder, and what nobody noticed."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    for each in found:
        folder = "/".join(Path(each["file"]).parts[:3][: -1 if each["file"].count("/") < 3 else 3])
        for name in (folder, "all"):
            folders[name].update((each["by"], "hung" if each["hung"] else "", "drawn"))
    yield "| folder | drawn | by the mirrored files | by all | of which hung |"
    yield "|---|---|---|---|---|"
    for name in [*sorted(set(folders) - {"all"}), "all"]:
        count = folders[name]
        drawn, mirrored = count["drawn"], count["mirrored"]
        caught = mirrored + count["others"]
        shares = f"{mirrored} ({mirrored / drawn:.0%}) | {caught} ({caught / drawn:.0%})"
        yield f"| {name} | {drawn} | {shares} | {count['hung']} |"
    yield ""
    for each in sorted(found, key=lambda each: (each["file"], each["line"])):
        if each["by"] == "nobody":
            tests = f"{each['running']} tests run it, {each['left_out']} were left out"
            yield f"- {each['name']} ({tests})"


def main() -> None:
    """Run, or report."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    add = running.add_argument
    add("--folder", type=Path, required=True, help="that of scripts.test_lines")
    add("--seed", type=int, default=1)
    add("--count", type=int, default=100)
    add("--only", default="smart_embedder", help="a folder or a file of smart_embedder/")
    add("--jobs", type=int, default=1)
    add("--seconds", type=float, default=60.0, help="for other than mirrored tests")
    add("--without-servers", action="store_true", help="a later run asks those")
    reporting = commands.add_parser("report")
    reporting.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments)
    else:
        print("\n".join(table(results(arguments.results))))


if __name__ == "__main__":
    main()
