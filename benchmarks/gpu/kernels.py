"""How many kernels a forward launches and which take the time, by PyTorch's profiler.

python -m benchmarks.gpu.kernels FOLDER --device cuda --kind embedder
python -m benchmarks.gpu.kernels QWEN_FOLDER --device cuda --kind reranker
"""

import argparse
import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.checkpoints import SHAPES, save_bge_m3
from smart_embedder.engine import Engine
from smart_embedder.engine.model import Model
from smart_embedder.engine.records import Outputs
from smart_embedder.models.load import load_models
from smart_embedder.settings import NO_RERANKER, Settings

_TEXTS = {"one query": (1, 16), "a batch": (64, 256)}
_QUICK_TEXTS = {"one query": (1, 16), "a batch": (8, 64)}
_MOST_KERNELS = 12
_DENSE = Outputs(dense=True)


def profile_forward(model: Model, texts: int, length: int, *, cuda: bool) -> dict[str, Any]:
    """One forward of so many texts, after two that are not counted."""
    drawn = list(np.random.default_rng(0).integers(5, 100, (texts, length)))

    def run() -> None:
        model.launch(drawn, [_DENSE] * texts)()

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
        "texts": texts,
        "tokens": texts * length,
        "launches": calls.total(),
        "microseconds": took.total(),
        "kernels": [
            {"name": name[:100], "calls": calls[name], "microseconds": round(of, 1)}
            for name, of in took.most_common(_MOST_KERNELS)
        ],
    }


async def measure(settings: Settings, kind: str, sizes: dict[str, tuple[int, int]]) -> Any:
    """A table for each size."""
    async with Engine(settings, load_models) as engine:
        models = engine.loaded()
        assert models is not None
        model = models.embedder if kind == "embedder" else models.reranker
        assert model is not None
        cuda = models.device.gpu_available and torch.cuda.is_available()
        return {name: profile_forward(model, *size, cuda=cuda) for name, size in sizes.items()}


def _settings(folder: Path, kind: str, device: str) -> Settings:
    if kind == "embedder":
        return Settings(embedding_model=str(folder), reranker_model=NO_RERANKER, device=device)
    # Any embedding model will do beside the reranker.
    small = save_bge_m3(folder.with_name("two-layer"), SHAPES["two-layer"])
    return Settings(embedding_model=str(small), reranker_model=str(folder), device=device)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kind", choices=("embedder", "reranker"), default="embedder")
    parser.add_argument("--quick", action="store_true", help="few short texts")
    arguments = parser.parse_args()
    settings = _settings(arguments.folder.resolve(), arguments.kind, arguments.device)
    sizes = _QUICK_TEXTS if arguments.quick else _TEXTS
    print(json.dumps(asyncio.run(measure(settings, arguments.kind, sizes))))


if __name__ == "__main__":
    main()
