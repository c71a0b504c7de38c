"""Ingest many generated chunks with kill -9 at random moments: is every point there, and once?

    python -m scripts.ingest_kills                     100,000 chunks, Qdrant Edge in the ingest
    python -m scripts.ingest_kills --chunks 1000000
    python -m scripts.ingest_kills --server            Qdrant's engine in Python in a process beside
    python -m scripts.ingest_kills --every 14        kill the ingest every 14 seconds to its end
    python -m scripts.ingest_kills --qdrant http://127.0.0.1:6333    a server of yours

It serves a tiny random checkpoint, starts `smart-embedder ingest`, kills the ingest five times and
the service twice, and starts each again. At the end it compares the collection with what was
generated, runs the ingest once more, and fails if a point is missing, is there twice, or is stored
again, or if the memory of a process grew by more than 5 % after its first minute.

Memory is what a process has for itself, as the mean of half a minute: what is being sent at a
moment is a tenth of the ingest's. The half minute after the first minute is compared with each
later one of the same process. Qdrant Edge keeps what it indexes in the memory of the ingest, so
that this is printed and not judged; with a server, the ingest's memory is its own.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import qdrant_edge
from qdrant_client import QdrantClient

from tests.support.checkpoints import WORDS, save_m3
from tests.support.copied_process import CopiedProcess
from tests.support.memory import status_bytes
from tests.support.qdrant.process import run_qdrant
from tests.support.relay import Relay
from tests.support.server import REPOSITORY, RunningServer, start_process

COLLECTION = DATASET = "chunks"
EDGE = "edge:"
SETTLED_SECONDS, WINDOW_SECONDS = 60.0, 30.0
MOST_GROWTH = 0.05
SECONDS_BETWEEN_SAMPLES = 0.25


@dataclass
class Memory:
    """Samples of one process after another: seconds since it started, and bytes."""

    name: str
    lives: list[list[tuple[float, int]]] = field(default_factory=list)

    def sample(self, pid: int, began: float) -> None:
        """Add one, unless the process has just ended."""
        try:
            size = status_bytes(pid, "RssAnon")
        except (OSError, ValueError):
            return
        self.lives[-1].append((time.monotonic() - began, size))

    @property
    def changes(self) -> list[tuple[float, float]]:
        """For each life that is long enough: the least and the most, against the first minute."""
        found = []
        for life in self.lives:
            settled, *later = _means(life)[int(SETTLED_SECONDS / WINDOW_SECONDS) :] or [0.0]
            if later:
                found.append((min(later) / settled - 1, max(later) / settled - 1))
        return found


def _means(life: list[tuple[float, int]]) -> list[float]:
    """The mean of each window that is complete."""
    windows: dict[int, list[int]] = {}
    for at, size in life:
        windows.setdefault(int(at / WINDOW_SECONDS), []).append(size)
    return [statistics.mean(windows[i]) for i in range(max(windows, default=0))]


class Process:
    """A process that is killed and started again, and sampled while it lives."""

    def __init__(self, name: str) -> None:
        self.memory = Memory(name)
        self.process: subprocess.Popen[str] | CopiedProcess | None = None

    def watch(self, process: "subprocess.Popen[str] | CopiedProcess") -> None:
        """Sample it until it ends."""
        self.process = process
        self.memory.lives.append([])
        threading.Thread(target=self._sample, args=(process,), daemon=True).start()

    def _sample(self, process: "subprocess.Popen[str] | CopiedProcess") -> None:
        began = time.monotonic()
        pause = threading.Event()
        while process.poll() is None:
            self.memory.sample(process.pid, began)
            pause.wait(SECONDS_BETWEEN_SAMPLES)


class Trial:
    """One load with all its kills."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, relay: Relay) -> None:
        self.arguments = arguments
        self.folder = folder
        self.relay = relay
        self.rng = random.Random(arguments.seed)
        self.service, self.ingest = Process("service"), Process("ingest")
        self.source = folder / "chunks.jsonl"
        self.address = arguments.qdrant or f"edge:{folder / 'edge'}"
        self.checkpoint = save_m3(folder / "tiny-m3")

    def generate(self) -> None:
        """A line for each chunk, each with a number of its own."""
        with self.source.open("w") as file:
            for text in self.texts():
                file.write(json.dumps({"text": text}) + "\n")

    def texts(self) -> Iterator[str]:
        """The same ones each time."""
        rng = random.Random(self.arguments.seed)
        for number in range(self.arguments.chunks):
            yield f"{number} {' '.join(rng.choices(WORDS, k=6))}"

    def start_service(self) -> None:
        """Start it behind the address that stays."""
        settings = {"EMBEDDING_MODEL": str(self.checkpoint), "MAX_QUEUE_SIZE": "200"}
        process = start_process(self.folder, **settings)
        running = RunningServer(process)
        running.wait_until_healthy()
        self.service.watch(process)
        self.relay.connect_to(running.url)

    def kill_service(self) -> None:
        """As a crash would, and start it again."""
        assert self.service.process is not None
        self.relay.port = None
        self.service.process.kill()
        self.service.process.wait(60)
        self.start_service()

    def start_ingest(self, *more: str) -> "subprocess.Popen[str]":
        """The command as users run it."""
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "smart_embedder_client", "ingest", str(self.source)),
                *("--url", self.relay.url, "--qdrant", self.address, "--collection", COLLECTION),
                *("--dataset", DATASET, "--journal", str(self.folder / "journal"), "--json"),
                *more,
            ],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "client" / "src")},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ingest.watch(process)
        return process

    def load(self) -> float:
        """Kill and start again until it ends by itself; how many seconds it took."""
        kills = ["ingest"] * self.arguments.kills + ["service"] * self.arguments.service_kills
        self.rng.shuffle(kills)
        began = time.monotonic()
        run = self.start_ingest()
        for victim in kills:
            try:
                run.wait(self.rng.uniform(2.0, self.arguments.between))
            except subprocess.TimeoutExpired:
                pass
            else:
                print(f"the ingest ended before the next kill of the {victim}: use more chunks")
                break
            print(f"{time.monotonic() - began:6.0f} s  kill -9 of the {victim}", flush=True)
            if victim == "service":
                self.kill_service()
            else:
                run.kill()
                run.wait(60)
                run = self.start_ingest()
        printed, _ = run.communicate()
        if run.returncode != 0:
            sys.exit(f"the ingest failed: {printed}")
        return time.monotonic() - began

    def load_in_lives_of(self, seconds: float) -> float:
        """Kill the ingest whenever it is so old, until it ends by itself; how long it took.

        Stops with an error if a life has stored nothing, so that there would be no end.
        """
        began, stored = time.monotonic(), 0
        while True:
            # Qdrant Edge makes its graph in one step, which may take longer.
            run = self.start_ingest("--no-index")
            try:
                printed, _ = run.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                run.kill()
                run.communicate(timeout=60)
            else:
                if run.returncode != 0:
                    sys.exit(f"the ingest failed: {printed}")
                return time.monotonic() - began
            before, stored = stored, sum(1 for _ in stored_texts(self.address))
            print(f"{time.monotonic() - began:6.0f} s  killed with {stored} stored", flush=True)
            if stored == before:
                sys.exit(f"{seconds:g} seconds stored nothing")

    def missing_and_doubled(self) -> tuple[int, int]:
        """How many texts the collection does not have, and how many it has more than once."""
        found = Counter(stored_texts(self.address))
        missing = sum(text not in found for text in self.texts())
        return missing, sum(count > 1 for count in found.values())

    def run_again(self) -> int:
        """How many points a second run stores."""
        printed, _ = self.start_ingest().communicate()
        return int(json.loads(printed)["uploaded"])


def stored_texts(address: str) -> Iterator[str]:
    """The texts of all points, read without the code that stored them."""
    if not address.startswith(EDGE):
        yield from _texts_of_server(address)
        return
    shard = qdrant_edge.EdgeShard.load(str(Path(address.removeprefix(EDGE), COLLECTION)))
    offset = None
    while True:
        request = qdrant_edge.ScrollRequest(offset=offset, limit=1000, with_payload=True)
        points, offset = shard.scroll(request)
        yield from (str((point.payload or {})["text"]) for point in points)
        if offset is None:
            shard.close()
            return


def _texts_of_server(address: str) -> Iterator[str]:
    client = QdrantClient(address, timeout=60, check_compatibility=False)
    offset = None
    while True:
        points, offset = client.scroll(COLLECTION, limit=1000, offset=offset)
        yield from (str((point.payload or {})["text"]) for point in points)
        if offset is None:
            client.close()
            return


def report(trial: Trial, seconds: float) -> bool:
    """Print what was found; whether it is as it should be."""
    missing, doubled = trial.missing_and_doubled()
    again = trial.run_again()
    chunks = trial.arguments.chunks
    print(f"{chunks} chunks in {seconds:.0f} s, {chunks / seconds:.0f} a second with all restarts")
    print(f"missing {missing}, twice {doubled}, stored by a second run {again}")
    is_good = (missing, doubled, again) == (0, 0, 0)
    for memory in (trial.ingest.memory, trial.service.memory):
        peak = max((size for life in memory.lives for _, size in life), default=0)
        changes = memory.changes
        told = ", ".join(f"{least:+.1%} to {most:+.1%}" for least, most in changes)
        print(
            f"{memory.name}: at most {peak / 2**20:.0f} MiB; "
            f"after the first minute {told or 'no process lived long enough'}"
        )
        is_judged = memory is trial.service.memory or not trial.address.startswith(EDGE)
        is_good = is_good and (not is_judged or all(most <= MOST_GROWTH for _, most in changes))
    return is_good


def main() -> None:
    """Run one trial."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--chunks", type=int, default=100_000, help="chunks that are generated (%(default)s)"
    )
    parser.add_argument(
        "--kills", type=int, default=5, help="how often the ingest is killed (%(default)s)"
    )
    parser.add_argument(
        "--service-kills", type=int, default=2, help="how often the service is killed (%(default)s)"
    )
    parser.add_argument(
        "--between", type=float, default=15.0, help="the most seconds between kills (%(default)g)"
    )
    parser.add_argument(
        "--every",
        type=float,
        metavar="SECONDS",
        help="kill the ingest whenever it is so old, instead of at random moments",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()),
        help="the seed of what is random (%(default)s)",
    )
    parser.add_argument("--qdrant", help="the address of a server (Qdrant Edge)")
    parser.add_argument(
        "--server", action="store_true", help="start a process with Qdrant's engine in Python"
    )
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        relay = stack.enter_context(Relay())
        if arguments.server:
            arguments.qdrant = stack.enter_context(run_qdrant()).url
        trial = Trial(arguments, Path(folder), relay)
        trial.generate()
        trial.start_service()
        try:
            every = arguments.every
            is_good = report(trial, trial.load_in_lives_of(every) if every else trial.load())
        finally:
            for each in (trial.ingest, trial.service):
                if each.process is not None:
                    each.process.kill()
                    each.process.wait(60)
    if not is_good:
        sys.exit(1)


if __name__ == "__main__":
    main()
