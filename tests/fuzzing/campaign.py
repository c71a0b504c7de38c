"""Fuzzes the parsers, one after the other; scripts/check_sanitizers.sh calls it.

    python -m tests.fuzzing.campaign FOLDER [--seconds 3600] [--targets heads lines ...]

FOLDER keeps what was found to reach new code, for the next run, and inputs that are read wrongly.
The exit status is 1 if there are any.
"""

import re
import subprocess
import sys
from argparse import ArgumentParser
from hashlib import sha256
from pathlib import Path

from tests.fuzzing.targets import MODULES, load

# An input takes milliseconds. Where the process was stopped meanwhile it seems to take minutes, so
# what takes longer is tried once more.
_SECONDS_FOR_AN_INPUT = 60
_MEGABYTES = 4096


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m tests.fuzzing.campaign")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--targets", nargs="+", choices=MODULES, default=list(MODULES))
    given = parser.parse_args(arguments)
    seconds = max(1, round(given.seconds / len(given.targets)))
    wrong = [run(name, given.folder, seconds) for name in given.targets]
    return int(any(wrong))


def run(name: str, folder: Path, seconds: int) -> list[Path]:
    """Fuzz one target in a process of its own, to the first input that is read wrongly.

    Returns those that are, also of earlier runs: what is mended is removed.
    """
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
        *(f"-max_total_time={seconds}", f"-max_len={target.longest}"),
        *(f"-timeout={_SECONDS_FOR_AN_INPUT}", f"-rss_limit_mb={_MEGABYTES}"),
        *("-use_value_profile=1", f"-artifact_prefix={found}/", str(corpus)),
    )
    said = log.read_text(errors="replace")
    # Executions, branches and features that were reached, and inputs, as libFuzzer counts them.
    print(f"{name}:", *re.findall(r"(?m)^#\d.* cov: .*$", said)[-1:], flush=True)
    wrong = [path for path in sorted(found.iterdir()) if not _is_right(name, path)]
    if status and not wrong and "ERROR: libFuzzer: timeout" not in said:
        wrong = [log]
    if wrong:
        print(said[-5000:], f"\n{name} reads wrongly: {', '.join(map(str, wrong))}", flush=True)
    return wrong


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
