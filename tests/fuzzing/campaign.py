"""Fuzzes the parsers, one after the other; scripts/check_sanitizers.sh calls it.

    python -m tests.fuzzing.campaign FOLDER [--seconds 3600] [--targets heads bodies ...]

FOLDER keeps inputs that reach new code, for the next run, and inputs that a parser fails on. The
exit status is 1 if there are any of the latter.
"""

import re
import subprocess
import sys
from argparse import ArgumentParser
from hashlib import sha256
from pathlib import Path

from tests.fuzzing.inputs import MODULES, load

# An input takes milliseconds, but seems to take minutes if the process was stopped meanwhile.
_SECONDS_FOR_AN_INPUT = 60
_MEGABYTES = 4096


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m tests.fuzzing.campaign")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--targets", nargs="+", choices=MODULES, default=list(MODULES))
    options = parser.parse_args(arguments)
    seconds = max(1, round(options.seconds / len(options.targets)))
    failures = [run(name, options.folder, seconds) for name in options.targets]
    return int(any(failures))


def run(name: str, folder: Path, seconds: int) -> list[Path]:
    """Fuzz one target in a new process, until an input fails.

    Returns the failing inputs, also of earlier runs; those that pass now are removed.
    """
    corpus, found = folder / "corpus" / name, folder / "found" / name
    for subfolder in (corpus, found):
        subfolder.mkdir(parents=True, exist_ok=True)
    target = load(name)
    for seed in target.seeds():
        (corpus / sha256(seed).hexdigest()[:16]).write_bytes(seed)
    log = folder / f"{name}.log"
    status = _fuzz(
        name,
        log,
        *(f"-max_total_time={seconds}", f"-max_len={target.longest}"),
        *(f"-timeout={_SECONDS_FOR_AN_INPUT}", f"-rss_limit_mb={_MEGABYTES}"),
        *("-use_value_profile=1", f"-artifact_prefix={found}/", str(corpus)),
    )
    output = log.read_text(errors="replace")
    # libFuzzer's counts of executions, branches, features and inputs.
    print(f"{name}:", *re.findall(r"(?m)^#\d.* cov: .*$", output)[-1:], flush=True)
    failing = [path for path in sorted(found.iterdir()) if not _passes(name, path)]
    if status and not failing and "ERROR: libFuzzer: timeout" not in output:
        failing = [log]
    if failing:
        print(output[-5000:], f"\n{name} fails: {', '.join(map(str, failing))}", flush=True)
    return failing


def _passes(name: str, path: Path) -> bool:
    """Return whether an input that failed passes now; then it is removed."""
    passes = not _fuzz(name, path.with_suffix(".log"), f"-rss_limit_mb={_MEGABYTES}", str(path))
    path.with_suffix(".log").unlink()
    if passes:
        path.unlink()
    return passes


def _fuzz(name: str, log: Path, *arguments: str) -> int:
    """Run a process with arguments of libFuzzer, and return its exit status."""
    command = [sys.executable, "-m", "tests.fuzzing.fuzz", name, *arguments]
    with log.open("wb") as output:
        return subprocess.run(command, stdout=output, stderr=output, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
