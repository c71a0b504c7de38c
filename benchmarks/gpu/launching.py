"""A query's forward as a CUDA graph and without, alone and beside a busy event loop.

    python -m benchmarks.gpu.launching FOLDER --device cuda

The interpreter's switch interval says how soon the loop lets the forward go on. Prints JSON, in
milliseconds, and the loop's speed as a share of that without forwards.
"""

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from smart_embedder.engine.records import Outputs
from smart_embedder.models.load import load_models
from smart_embedder.models.tasks.dense import M3Embedder
from smart_embedder.settings import NO_RERANKER, Settings

_TOKENS = 16
_INTERVALS = (0.005, 0.001, 0.0005, 0.0001, 0.00005)
_TASKS = 16
_BODY = json.dumps({"sentences": ["a few words of a text"] * 64})


class BusyLoop:
    """An event loop whose tasks decode JSON all the time."""

    def __init__(self) -> None:
        self._ended = False
        self._decoded = 0

    def run(self, seconds: float) -> float:
        """Bodies decoded a second."""
        uvloop.run(self._run(seconds))
        return self._decoded / seconds

    async def _run(self, seconds: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_TASKS):
                tasks.create_task(self._decode())
            await asyncio.sleep(seconds)
            self._ended = True

    async def _decode(self) -> None:
        while not self._ended:
            json.loads(_BODY)
            self._decoded += 1
            await asyncio.sleep(0)


def forwards(run: Callable[[], object], seconds: float) -> list[float]:
    """Milliseconds of one after the other; of one at least, however long it takes."""
    took: list[float] = []
    ends = time.perf_counter() + seconds
    while not took or time.perf_counter() < ends:
        began = time.perf_counter()
        run()
        took.append(1000 * (time.perf_counter() - began))
    return took


def beside_a_busy_loop(run: Callable[[], object], seconds: float) -> tuple[list[float], float]:
    """Milliseconds of the forwards, and how fast the loop was."""
    took: list[float] = []
    thread = threading.Thread(target=lambda: took.extend(forwards(run, seconds)))
    thread.start()
    rate = BusyLoop().run(seconds)
    thread.join()
    return took, rate


def measure(model: M3Embedder, seconds: float) -> Iterator[dict[str, Any]]:
    """One row for each way to launch and each interval; without graphs last."""
    query = [np.random.default_rng(0).integers(5, 100, _TOKENS)]
    outputs = [Outputs(dense=True)]

    def run() -> None:
        model.launch(query, outputs)()

    undisturbed = BusyLoop().run(seconds)
    ways = [model.info.paths.get("launch", "eager")]
    for launch in ways if ways == ["eager"] else [*ways, "eager"]:
        if launch == "eager":
            model._backbone._graphs = None  # noqa: SLF001 - no setting turns them off
        run()
        alone = statistics.median(forwards(run, seconds))
        for interval in _INTERVALS:
            sys.setswitchinterval(interval)
            took, rate = beside_a_busy_loop(run, seconds)
            yield {
                "launch": launch,
                "switch_ms": 1000 * interval,
                "alone_ms": alone,
                "beside_ms": statistics.median(took),
                "longest_ms": max(took),
                "loop": rate / undisturbed,
            }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="half a second for each row")
    arguments = parser.parse_args()
    folder = str(arguments.folder.resolve())
    settings = Settings(embedding_model=folder, reranker_model=NO_RERANKER, device=arguments.device)
    model = load_models(settings).embedder
    assert isinstance(model, M3Embedder)
    print(json.dumps(list(measure(model, 0.5 if arguments.quick else 2.0))))


if __name__ == "__main__":
    main()
