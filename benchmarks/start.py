"""From the start of the service's process to ready, against reading the weights once.

    python -m benchmarks.start FOLDER --rounds 5

The two take turns, each with the weights out of the system's cache (on POSIX systems), or with
`--warm` all of them in it. Before each turn there is a pause, in which a virtual machine gives back
the memory that the cache had.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_READY = "Server ready to accept requests"
_AT_ONCE = 2**24


def weights_of(*folders: Path) -> list[Path]:
    """The files that hold the weights of models."""
    patterns = ("*.safetensors", "pytorch_model*.bin")
    return [path for folder in folders for pattern in patterns for path in folder.glob(pattern)]


def drop(paths: list[Path]) -> None:
    """Take the files out of the system's cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(paths: list[Path]) -> None:
    """Read each file once, from beginning to end."""
    buffer = bytearray(_AT_ONCE)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def start(folder: Path, reranker: str, dtype: str) -> None:
    """Start the service and wait for its word that it is ready; it is ended afterwards."""
    settings = {
        "EMBEDDING_MODEL": str(folder.resolve()),
        "RERANKER_MODEL": str(Path(reranker).resolve()) if Path(reranker).is_dir() else reranker,
        "DTYPE": dtype,
        "HF_HUB_OFFLINE": "1",
        "HOST": "127.0.0.1",
        "PORT": "0",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "smart_embedder"],
        cwd=_ROOT,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            wait_until_ready(process)
        finally:
            process.kill()


def wait_until_ready(process: "subprocess.Popen[str]") -> None:
    """Read the service's log until it says that it is ready; end this program if it never does."""
    last = ""
    for last in process.stdout or ():
        if _READY in last:
            return
    sys.exit(f"the service did not start: {last}")


def seconds(run: Callable[[], None]) -> float:
    """How long `run` takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    """Print the seconds of every round, and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkpoint of bge-m3's shape")
    parser.add_argument(
        "--reranker", default="late-interaction", help="the setting RERANKER_MODEL (%(default)s)"
    )
    parser.add_argument("--dtype", default="auto", help="the number format, as DTYPE (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case (%(default)s)")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds before each turn")
    parser.add_argument("--warm", action="store_true", help="measure with the files in the cache")
    arguments = parser.parse_args()
    paths = weights_of(arguments.folder, Path(arguments.reranker))
    turns: dict[str, Callable[[], None]] = {
        "read": lambda: read(paths),
        "start": lambda: start(arguments.folder, arguments.reranker, arguments.dtype),
    }
    prepare = read if arguments.warm else drop
    found: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(arguments.rounds):
        for name, run in turns.items():
            prepare(paths)
            time.sleep(arguments.pause)
            found[name].append(seconds(run))
        print("  ".join(f"{name} {of[-1]:.2f} s" for name, of in found.items()), flush=True)
    medians = {name: statistics.median(of) for name, of in found.items()}
    print("median:", "  ".join(f"{name} {of:.2f} s" for name, of in medians.items()))
    print(f"a start takes {medians['start'] / medians['read']:.2f} times as long as reading")


if __name__ == "__main__":
    main()
