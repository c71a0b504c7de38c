"""Forwards of one model on a device, as JSON: which kernels take the time, and how they start.

    python -m benchmarks.gpu.forwards FOLDER kernels --device cuda
    python -m benchmarks.gpu.forwards QWEN_FOLDER reranker-kernels --device cuda
    python -m benchmarks.gpu.forwards FOLDER launching --device cuda

`kernels` is what PyTorch's profiler sees of one query and of a batch. `launching` is a query's
forward as a CUDA graph and without, alone and beside a busy event loop: the interpreter's switch
interval says how soon the loop lets the forward go on. Milliseconds, and the loop's speed as a
share of that without forwards.
"""

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from torch.profiler import ProfilerActivity, profile

from benchmarks.checkpoints import SHAPES, save_bge_m3
from smart_embedder.engine.records import Outputs
from smart_embedder.models.load import load_models
from smart_embedder.settings import NO_RERANKER, Settings

_SIZES = {"one query": (1, 16), "a batch": (64, 256)}
_QUICK_SIZES = {"one query": (1, 16), "a batch": (8, 64)}
_MOST_KERNELS = 12
_DENSE = Outputs(dense=True)
_INTERVALS = (0.005, 0.001, 0.0005, 0.0001, 0.00005)
_BODY = json.dumps({"sentences": ["a few words of a text"] * 64})


def forward_of(model: Any, texts: int, length: int) -> Callable[[], object]:
    """What computes so many random texts."""
    drawn = list(np.random.default_rng(0).integers(5, 100, (texts, length)))

    def run() -> None:
        model.launch(drawn, [_DENSE] * texts)()

    return run


def profiled(run: Callable[[], object], *, cuda: bool) -> dict[str, Any]:
    """The kernels of one forward, after two that are not counted."""
    run()
    run()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        run()
    device = "CUDA" if cuda else "CPU"
    took: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type.name == device:
            took[event.name] += event.device_time_total if cuda else event.self_cpu_time_total
            calls[event.name] += 1
    return {
        "launches": calls.total(),
        "microseconds": took.total(),
        "kernels": [
            {"name": name[:100], "calls": calls[name], "microseconds": round(of, 1)}
            for name, of in took.most_common(_MOST_KERNELS)
        ],
    }


def busy_loop(seconds: float) -> float:
    """Bodies a second that the tasks of an event loop decode, which do nothing else."""
    decoded = 0

    async def decode() -> None:
        nonlocal decoded
        while time.perf_counter() < ends:
            json.loads(_BODY)
            decoded += 1
            await asyncio.sleep(0)

    async def run() -> None:
        await asyncio.gather(*(decode() for _ in range(16)))

    ends = time.perf_counter() + seconds
    uvloop.run(run())
    return decoded / seconds


def forwards(run: Callable[[], object], seconds: float) -> list[float]:
    """Milliseconds of one after the other; of one at least, however long it takes."""
    took: list[float] = []
    ends = time.perf_counter() + seconds
    while not took or time.perf_counter() < ends:
        began = time.perf_counter()
        run()
        took.append(1000 * (time.perf_counter() - began))
    return took


def launching(model: Any, seconds: float) -> list[dict[str, Any]]:
    """One row for each way to launch and each interval; without graphs last."""
    run = forward_of(model, 1, 16)
    undisturbed = busy_loop(seconds)
    rows = []
    for launch in dict.fromkeys([model.info.paths.get("launch", "eager"), "eager"]):
        if launch == "eager":
            model._backbone._graphs = None  # noqa: SLF001 - no setting turns them off
        run()
        alone = statistics.median(forwards(run, seconds))
        for interval in _INTERVALS:
            sys.setswitchinterval(interval)
            took: list[float] = []
            beside = threading.Thread(target=lambda to=took: to.extend(forwards(run, seconds)))
            beside.start()
            rate = busy_loop(seconds)
            beside.join()
            row = {"launch": launch, "switch_ms": 1000 * interval, "alone_ms": alone}
            row |= {"beside_ms": statistics.median(took), "longest_ms": max(took)}
            rows.append(row | {"loop": rate / undisturbed})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=("kernels", "reranker-kernels", "launching"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="few short texts, and less time")
    arguments = parser.parse_args()
    embedder, reranker = arguments.folder.resolve(), NO_RERANKER
    if arguments.what == "reranker-kernels":
        # Any embedding model will do beside the reranker.
        reranker = str(embedder)
        embedder = save_bge_m3(embedder.with_name("two-layer"), SHAPES["two-layer"])
    models = load_models(
        Settings(embedding_model=str(embedder), reranker_model=reranker, device=arguments.device)
    )
    if arguments.what == "launching":
        print(json.dumps(launching(models.embedder, 0.5 if arguments.quick else 2.0)))
        return
    model = models.embedder if reranker == NO_RERANKER else models.reranker
    cuda = models.device.gpu_available and torch.cuda.is_available()
    sizes = _QUICK_SIZES if arguments.quick else _SIZES
    found = {
        name: {"tokens": texts * length} | profiled(forward_of(model, texts, length), cuda=cuda)
        for name, (texts, length) in sizes.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
