"""From the start of the service's process to ready, against reading the weights once.

    python -m benchmarks.start FOLDER --rounds 5

The two take turns, each with the weights out of the system's cache (on POSIX systems), or with
`--warm` all of them in it. Before each turn there is a pause, in which a virtual machine gives back
the memory that the cache had.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.turns import measure, rounds_of
from tests.support.server import RunningServer, start_process

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


def start(settings: dict[str, str]) -> None:
    """Start the service and wait for its word that it is ready; it is ended at once."""
    with tempfile.TemporaryDirectory() as scratch:
        process = start_process(Path(scratch), fresh=True, **settings)
        server = RunningServer(process)
        try:
            server.wait_for_line(_READY)
        finally:
            process.kill()
            process.wait()
            server.close()


def main() -> None:
    """Print the seconds of every round, and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="a checkpoint of bge-m3's shape")
    add("--reranker", default="late-interaction", help="as RERANKER_MODEL (%(default)s)")
    add("--dtype", default="auto", help="the number format, as DTYPE (%(default)s)")
    add("--rounds", type=int, default=5, help="turns of each case (%(default)s)")
    add("--pause", type=float, default=5.0, help="seconds before each turn (%(default)g)")
    add("--warm", action="store_true", help="measure with the files in the cache")
    arguments = parser.parse_args()
    reranker = Path(arguments.reranker)
    paths = weights_of(arguments.folder, reranker)
    settings = {
        "EMBEDDING_MODEL": str(arguments.folder.resolve()),
        "RERANKER_MODEL": str(reranker.resolve()) if reranker.is_dir() else arguments.reranker,
        "DTYPE": arguments.dtype,
    }

    def prepare() -> None:
        (read if arguments.warm else drop)(paths)
        time.sleep(arguments.pause)

    runs = {"read": lambda: read(paths), "start": lambda: start(settings)}
    seconds = measure(runs, arguments.rounds, prepare)
    for name, took in seconds.items():
        print(f"{name:6}{rounds_of(took)}")
    ratio = statistics.median(seconds["start"]) / statistics.median(seconds["read"])
    print(f"a start takes {ratio:.2f} times as long as reading")


if __name__ == "__main__":
    main()
