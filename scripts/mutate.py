"""How many small faults does the suite notice? The faults are those of `scripts.mutants`.

    python -m scripts.mutate run --folder /tmp/mutation --seed 1 --count 300 --jobs 2
    python -m scripts.mutate report /tmp/mutation/1.jsonl

Each fault is planted in a copy of the working tree, never in the tree itself. First the tests that
mirror the file look for it: tests/api/test_body*.py for api/body.py, or where there is no such file
those of its folder; then the quick tests of the whole service, and then all of them. Kinds of
faults are drawn with the weight of the square root of how many there are, and the faults of a kind
at random; the same seed draws the same from the same sources. Results are appended to
FOLDER/SEED.jsonl, and a run goes on where the last one stopped.

A failure must happen twice, and never without the fault. A test hangs when it takes longer than the
suite lets it. It needs the tests' environment on Linux.
"""

import argparse
import compileall
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from typing import Any

from scripts.mutants import Mutant, draw, mutants_below

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", "GOMP_SPINCOUNT": "2000"}
# For what never comes back to Python.
_MOST_SECONDS = 7200.0


def mirrored_files(file: str) -> list[str]:
    """The test files of a module; where it has none of its own, those of its folder.

    A folder's are tests/api/formats/test_*.py, or tests/api/test_formats.py.
    """
    folder = Path("tests", *Path(file).parts[1:-1])
    found = [*(ROOT / folder).glob("test_*.py"), ROOT / folder.parent / f"test_{folder.name}.py"]
    names = sorted(str(each.relative_to(ROOT)) for each in found if each.exists())
    own = re.compile(rf"test_{Path(file).stem}(_|$)")
    return [each for each in names if own.match(Path(each).stem)] or names


def all_files() -> list[str]:
    """The test files that mirror smart_embedder/, and those of faults and simulation."""
    mirrored = sorted(each.parent.name for each in (ROOT / "smart_embedder").glob("*/__init__.py"))
    folders = [ROOT / "tests" / name for name in (*mirrored, "simulation", "faults")]
    files = [each for folder in folders for each in folder.rglob("test_*.py")]
    files += [ROOT / "tests" / f"test_{name}.py" for name in ("main", "errors", "security")]
    return sorted(str(each.relative_to(ROOT)) for each in files if each.exists())


class Tree:
    """A copy of the working tree, in which faults are planted and tests are run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._root = self._folder / "tree"
        shutil.rmtree(self._root, ignore_errors=True)
        # What git tracks or would track, and the built kernels.
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        kernels = ROOT.glob("smart_embedder/models/ops/csrc/*.so")
        for name in [*names.splitlines(), *(str(each.relative_to(ROOT)) for each in kernels)]:
            if (ROOT / name).is_file():
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._root / name)
        # A changed file is told by its contents, as two changes may share a second.
        by_contents = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self._root, quiet=1, invalidation_mode=by_contents)

    def examine(self, mutant: Mutant) -> dict[str, Any]:
        """Who notices a fault: `mirrored`, `others` or `nobody`; the test, and whether it hung."""
        path, own = self._root / mutant.file, mirrored_files(mutant.file)
        began, source = time.monotonic(), path.read_bytes()
        by, test, hung = "nobody", "", False
        bad: set[str] = set()
        for stage in (own, ["--fast", *all_files()], all_files()):
            path.write_bytes(mutant.applied_to(source))
            try:
                while test := self._first_failing(stage, bad):
                    twice = self._first_failing([test.removesuffix(" (hung)")], set())
                    path.write_bytes(source)
                    if twice and not self._first_failing([test.removesuffix(" (hung)")], set()):
                        by = "mirrored" if stage is own else "others"
                        break
                    path.write_bytes(mutant.applied_to(source))
                    bad.add(test.removesuffix(" (hung)"))
            finally:
                path.write_bytes(source)
            if test:
                hung, test = test.endswith(" (hung)"), test.removesuffix(" (hung)")
                break
        found = {"by": by, "hung": hung, "test": test}
        seconds = round(time.monotonic() - began, 1)
        return {"name": mutant.name} | asdict(mutant) | found | {"seconds": seconds}

    def _first_failing(self, arguments: list[str], bad: set[str]) -> str:
        """The first test that fails, or the file that cannot be imported.

        ` (hung)` stands behind one that did not end in its time.
        """
        left_out = [f"--deselect={each}" for each in bad]
        options = ["-q", "-x", "-rfE", "--tb=line", "-n", "0", f"--basetemp={self._folder / 'tmp'}"]
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *left_out, *arguments],
            cwd=self._root,
            env=os.environ | ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                said = process.communicate(timeout=_MOST_SECONDS)[0]
            except subprocess.TimeoutExpired:
                # With the servers that it has started.
                os.killpg(process.pid, signal.SIGKILL)
                said = process.communicate()[0] + "Timeout (>"
        hung = " (hung)" if "Timeout (>" in said else ""
        if found := re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE):
            return found[1] + hung
        # Where even the start fails, all tests of the first file do.
        nothing_wrong = process.returncode in {0, 5}
        return "" if nothing_wrong else next(a for a in arguments if a[0] != "-") + hung


def run(folder: Path, seed: int, mutants: list[Mutant], jobs: int) -> None:
    """Find out about those that are not known yet, and write down what is found."""
    folder.mkdir(exist_ok=True)
    target = folder / f"{seed}.jsonl"
    target.touch()
    trees: SimpleQueue[Tree] = SimpleQueue()
    for job in range(jobs):
        trees.put(Tree(folder / f"job-{job}"))

    def examine(mutant: Mutant) -> None:
        tree = trees.get()
        found = tree.examine(mutant)
        trees.put(tree)
        with target.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{found['by']:8} {found['seconds']:6} {mutant.name}", file=sys.stderr, flush=True)

    known = {each["name"] for each in results([target])}
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(examine, [each for each in mutants if each.name not in known]))


def results(paths: list[Path]) -> list[dict[str, Any]]:
    """What runs have found."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


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
    yield from sorted(f"- {each['name']}" for each in found if each["by"] == "nobody")


def main() -> None:
    """Run, or report."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("run").add_argument
    add("--folder", type=Path, required=True, help="for the copies and the results")
    add("--seed", type=int, default=1)
    add("--count", type=int, default=100)
    add("--only", default="smart_embedder", help="a folder or a file of smart_embedder/")
    add("--jobs", type=int, default=1)
    reporting = commands.add_parser("report")
    reporting.add_argument("results", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "report":
        print("\n".join(table(results(given.results))))
        return
    drawn = draw(mutants_below(ROOT, given.only), given.seed, given.count)
    run(given.folder, given.seed, drawn, given.jobs)


if __name__ == "__main__":
    main()
