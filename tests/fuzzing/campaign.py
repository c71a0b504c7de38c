"""Fuzzes the parsers, one after the other; scripts/check_sanitizers.sh calls it.

    python -m tests.fuzzing.campaign FOLDER [--seconds 3600] [--targets heads lines ...]

FOLDER keeps what was found to reach new code, for the next run, and inputs that are read wrongly.
The exit status is 1 if there are any.
"""

import re
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path

from tests.fuzzing.targets import MODULES, load
from tools.table import markdown

# An input takes milliseconds. Where the process was stopped meanwhile it seems to take minutes, so
# what takes longer is tried once more.
_SECONDS_FOR_AN_INPUT = 60
_MEGABYTES = 4096
_EXECUTED = re.compile(r"stat::number_of_executed_units: (\d+)")
_COVERED = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)")


@dataclass(frozen=True, slots=True)
class Result:
    """How a target was fuzzed: `branches` and `features` are those that were reached."""

    name: str
    executions: int
    branches: int
    features: int
    inputs: int
    found: list[Path]


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m tests.fuzzing.campaign")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--targets", nargs="+", choices=MODULES, default=list(MODULES))
    given = parser.parse_args(arguments)
    results = []
    for name in given.targets:
        results.append(run(name, given.folder, given.seconds / len(given.targets)))
        print(f"{name}: {results[-1].executions:,} executions", flush=True)
    heads = ("target", "executions", "branches", "features", "inputs", "found")
    rows = ((*astuple(each)[:-1], ", ".join(map(str, each.found)) or "-") for each in results)
    print(markdown(heads, rows))
    return int(any(result.found for result in results))


def run(name: str, folder: Path, seconds: float) -> Result:
    """Fuzz one target in a process of its own, to the first input that is read wrongly."""
    corpus, found = folder / "corpus" / name, folder / "found" / name
    for each in (corpus, found):
        each.mkdir(parents=True, exist_ok=True)
    target = load(name)
    for seed in target.seeds():
        (corpus / sha256(seed).hexdigest()[:16]).write_bytes(seed)
    log = folder / f"{name}.log"
    status = _fuzz(
        name,
        log,
        *(f"-max_total_time={max(1, round(seconds))}", f"-max_len={target.longest}"),
        *(f"-timeout={_SECONDS_FOR_AN_INPUT}", f"-rss_limit_mb={_MEGABYTES}"),
        *("-use_value_profile=1", "-print_final_stats=1", f"-artifact_prefix={found}/"),
        str(corpus),
    )
    said = log.read_text(errors="replace")
    # Also those of earlier runs: what is mended is removed.
    wrong = [path for path in sorted(found.iterdir()) if not _is_right(name, path)]
    if status and not wrong and "ERROR: libFuzzer: timeout" not in said:
        wrong = [log]
    if wrong:
        print(said[-5000:], f"\n{name} reads wrongly: {', '.join(map(str, wrong))}", flush=True)
    executed, covered = _EXECUTED.findall(said) or ["0"], _COVERED.findall(said) or [("0",) * 3]
    return Result(name, int(executed[-1]), *map(int, covered[-1]), wrong)


def _is_right(name: str, path: Path) -> bool:
    """Whether an input that was found is read rightly now; then it is forgotten."""
    is_right = not _fuzz(name, path.with_suffix(".log"), f"-rss_limit_mb={_MEGABYTES}", str(path))
    path.with_suffix(".log").unlink()
    if is_right:
        path.unlink()
    return is_right


def _fuzz(name: str, log: Path, *arguments: str) -> int:
    """The exit status of a process with libFuzzer's arguments."""
    command = [sys.executable, "-m", "tests.fuzzing.fuzz", name, *arguments]
    with log.open("wb") as output:
        return subprocess.run(command, stdout=output, stderr=output, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
