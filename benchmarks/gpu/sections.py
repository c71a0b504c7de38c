"""What `benchmarks.gpu.report` measures of one checkpoint on a device, as JSON, section by section.

    python -m benchmarks.gpu.sections engines FOLDER --device cuda
    python -m benchmarks.gpu.sections reranker-kernels QWEN_FOLDER --device cuda

- `engines`: this engine and FlagEmbedding in turns, text length by text length, in tokens a second;
  a lone query's milliseconds, the token budget that the start chose, and memory.
- `rate`: the same of this engine alone, at 256 tokens, and in any number format (`--dtype`).
- `kernels`, `reranker-kernels`: what PyTorch's profiler sees of one query and of a batch.
- `http-rate`: tokens a second over HTTP from one service process, by clients in processes of their
  own, who ask for Arrow.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from app.formats import SAFETENSORS
from app.http_metrics import Metrics
from benchmarks.adapters import Setting
from benchmarks.checkpoints import save_two_layers
from benchmarks.workload import QUERIES, Lengths, draw_texts
from smart_embedder.core import EngineCore
from smart_embedder.requests import EmbedRequest, Outputs
from smart_embedder.settings import NO_RERANKER, EngineSettings
from smart_embedder.startup import load_models
from smart_embedder.vectors import OutputDtype
from tests.support.server import REPOSITORY, run_server

Figures = dict[str, Any]

# ---- this engine and FlagEmbedding

# Tokens of a text, and of all texts of one length; those of a rehearsal on a CPU. They are drawn
# once and repeated, so that the engine runs for seconds.
_LENGTHS, _TOKENS = (256, 32, 1024, 8192), 524_288
_QUICK_LENGTHS, _QUICK_TOKENS = (32, 128, 256, 512), 16_384
_REPEATED = 4
# That of the aims, which comes first.
_LENGTH = 256
# The names of what is asked for: whether that is more than dense vectors, and its numbers.
_KINDS: dict[str, tuple[bool, OutputDtype]] = {
    "dense": (False, "float32"),
    "all kinds": (True, "float32"),
    "all kinds, int8": (True, "int8"),
}
# At most, of one call of `embed`.
_TEXTS_IN_A_CALL, _TOKENS_IN_A_CALL = 256, 32_768
# How many calls wait at a time, with more tokens than the device has in flight, and for how many
# times as many calls there are at least.
_CALLS, _ANSWERED = 32, 4
_BETWEEN_LOOKS = 0.002
# After which no other length is begun, so that there are figures at all.
_SECONDS = 80.0
_QUERIES = 100
_ROUNDS = 2
# FlagEmbedding pads, and its rate hardly depends on how many texts there are.
_PEERS_SHARE = 8
_PEERS_TOKENS = 32_768  # of one of its batches


async def own_rate(
    engine: EngineCore,
    computed: Callable[[], float],
    texts: list[str],
    length: int,
    dtype: OutputDtype,
    *,
    every_kind: bool,
) -> float:
    """Tokens a second of texts of `length` tokens, while many calls wait.

    By the tokens that the engine has `computed`, batch after batch. Answers would tell another
    rate: the calls share the device, and are computed in part at any time. The first quarter does
    not count, where the device waits for the first texts to be tokenised.
    """
    most = _TEXTS_IN_A_CALL, _TOKENS_IN_A_CALL // length, len(texts) // (_ANSWERED * _CALLS)
    at_once = max(1, min(most))
    calls = iter([texts[start : start + at_once] for start in range(0, len(texts), at_once)])
    outputs = Outputs(dense=True, sparse=every_kind, colbert=every_kind)
    batches = [(time.perf_counter(), computed())]

    async def call_again_and_again() -> None:
        for call in calls:
            await engine.embed(EmbedRequest(call, outputs, output_dtype=dtype))

    def look() -> None:
        if (tokens := computed()) > batches[-1][1]:
            batches.append((time.perf_counter(), tokens))

    async def look_again_and_again() -> None:
        while True:
            look()
            await asyncio.sleep(_BETWEEN_LOOKS)

    looking = asyncio.create_task(look_again_and_again())
    await asyncio.gather(*(call_again_and_again() for _ in range(_CALLS)))
    looking.cancel()
    look()
    (began, before), (ended, after) = batches[len(batches) // 4], batches[-1]
    return (after - before) / (ended - began)


def load_peer(folder: Path, device: str) -> Any:
    """FlagEmbedding on the same files and device; in float16 on a GPU, as is its default."""
    try:
        from benchmarks.adapters import flag_embedding  # noqa: PLC0415 - seconds, may be missing

        return flag_embedding.Adapter(folder, "", device)
    except (ImportError, RuntimeError) as error:
        print(f"FlagEmbedding cannot be compared: {error}", file=sys.stderr)
        return None


def peer_rate(peer: Any, texts: list[str], length: int, *, every_kind: bool) -> float:
    """Tokens a second of texts of `length` tokens, all in one call, as its users make it."""
    began = time.perf_counter()
    peer.encode(texts, Setting(max(1, _PEERS_TOKENS // length)), every_kind=every_kind)
    return length * len(texts) / (time.perf_counter() - began)


async def rates(
    engine: EngineCore,
    computed: Callable[[], float],
    peer: Any,
    lengths: Sequence[int],
    tokens: int,
) -> list[Figures]:
    """One row for each length and selection of kinds; the best of FlagEmbedding's two rounds.

    On a slow device the longest texts are left out.
    """
    rows: list[Figures] = []
    ends = time.monotonic() + _SECONDS
    for length in lengths:
        texts = draw_texts(Lengths(length, length), max(1, tokens // length))
        fewer = texts[: max(1, len(texts) // _PEERS_SHARE)]
        for name, (every_kind, dtype) in _KINDS.items():
            if time.monotonic() > ends:
                return rows
            own = await own_rate(
                engine, computed, texts * _REPEATED, length, dtype, every_kind=every_kind
            )
            row = {"tokens": length, "kinds": name, "tokens_per_second": own}
            if peer is not None and dtype == "float32":
                other = [
                    peer_rate(peer, fewer, length, every_kind=every_kind) for _ in range(_ROUNDS)
                ]
                row |= {"flagembedding": max(other), "ratio": own / max(other)}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


async def lone_query(engine: EngineCore) -> dict[str, float]:
    """Milliseconds of one query after the other, dense vectors alone."""
    took = []
    for text in draw_texts(QUERIES, _QUERIES):
        began = time.perf_counter()
        await engine.embed(EmbedRequest([text]))
        took.append(1000 * (time.perf_counter() - began))
    p50, p95 = np.percentile(took, (50, 95))
    return {"p50_ms": float(p50), "p95_ms": float(p95), "min_ms": min(took)}


def memory() -> dict[str, int]:
    """Bytes at their peak, of the GPU's memory that PyTorch asked for."""
    if not torch.cuda.is_available():
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated": allocated, "reserved": reserved}


async def engines(
    folder: Path, device: str, *, quick: bool, dtype: str = "auto", alone: bool = False
) -> Figures:
    """The start, a lone query, and the rates of both, or of this engine `alone` at one length."""
    settings = EngineSettings(
        embedding_model=str(folder),
        reranker_model="none",
        device=device,
        dtype=dtype,
    )
    lengths: Sequence[int] = _QUICK_LENGTHS if quick else _LENGTHS
    if alone:
        lengths = (_LENGTH,)
    began, metrics = time.perf_counter(), Metrics()
    async with EngineCore(settings, load_models, metrics=metrics) as engine:
        models = engine.loaded()

        def computed() -> float:
            name = {"model": models.embedder.name}
            return metrics.registry.get_sample_value("embedder_tokens_processed_total", name) or 0

        found: Figures = {
            "torch": torch.__version__,
            "start_seconds": time.perf_counter() - began,
            "max_batch_tokens": models.max_batch_tokens,
            "dtype": models.device.dtype,
            "attention": models.device.attention,
            "paths": models.infos[0].paths,
            "refused": [f"{each.operation}: {each.path}" for each in models.infos[0].refused],
            "lone_query": await lone_query(engine),
        }
        before = memory()
        peer = None if alone else load_peer(folder, device)
        tokens = _QUICK_TOKENS if quick else _TOKENS
        found["rates"] = await rates(engine, computed, peer, lengths, tokens)
    return found | {"memory_before_load": before, "memory": memory()}


# ---- forwards of one model

_SIZES = {"one query": (1, 16), "a batch": (64, 256)}
_QUICK_SIZES = {"one query": (1, 16), "a batch": (8, 64)}
_MOST_KERNELS = 12
_DENSE = Outputs(dense=True)


def forward_of(model: Any, texts: int, length: int) -> Callable[[], object]:
    """What computes so many random texts."""
    drawn = list(np.random.default_rng(0).integers(5, 100, (texts, length)))

    def run() -> None:
        model.launch(drawn, [_DENSE] * texts)()

    return run


def profiled(run: Callable[[], object], *, cuda: bool) -> Figures:
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


def kernels(folder: Path, device: str, *, quick: bool, of_reranker: bool = False) -> Figures:
    """What a query's and a batch's forward consist of."""
    embedder, reranker = folder, NO_RERANKER
    if of_reranker:
        # Any embedding model will do beside the reranker.
        reranker = str(folder)
        embedder = save_two_layers(folder.with_name("two-layer"))
    models = load_models(
        EngineSettings(embedding_model=str(embedder), reranker_model=reranker, device=device)
    )
    placed = models.models[-1].models[0]
    model, on = placed.model, placed.device
    cuda = on.gpu_available and torch.cuda.is_available()
    return {
        name: {"tokens": texts * length} | profiled(forward_of(model, texts, length), cuda=cuda)
        for name, (texts, length) in (_QUICK_SIZES if quick else _SIZES).items()
    }


# ---- over HTTP

_TEXTS_IN_A_REQUEST = 32
_CONNECTIONS = 8
# Before the clock starts: every connection has sent at least one request by then.
_WARM_UP = 2.0
_HTTP_SECONDS, _QUICK_HTTP_SECONDS = 15.0, 5.0
# Where packages lie in a folder of their own, the service needs them, too.
_KEPT = ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")


def client(url: str, texts: int, seconds: float) -> int:
    """Requests answered in time; raises for any other answer than 200."""
    drawn = draw_texts(Lengths(_LENGTH, _LENGTH), 4 * texts)
    dense_alone = {"return_sparse": False, "return_colbert": False}
    bodies = [
        json.dumps({"sentences": drawn[start : start + texts]} | dense_alone).encode()
        for start in range(0, len(drawn), texts)
    ]
    began, answered = time.monotonic() + _WARM_UP, 0

    async def call_again_and_again(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal answered
        while (now := time.monotonic()) < began + seconds:
            body = bodies[number % len(bodies)]
            async with session.post(f"{url}/embeddings/", data=body) as response:
                response.raise_for_status()
                await response.read()
            answered += now >= began and time.monotonic() < began + seconds
            number += 1

    async def run() -> None:
        headers = {"Content-Type": "application/json", "Accept": SAFETENSORS}
        async with aiohttp.ClientSession(headers=headers) as session:
            calls = (call_again_and_again(session, first) for first in range(_CONNECTIONS))
            await asyncio.gather(*calls)

    asyncio.run(run())
    return answered


def http_rate(folder: Path, device: str, *, quick: bool) -> Figures:
    """Start a service, load it from several processes, and end it."""
    processes = max(1, min(6, (os.cpu_count() or 1) // 2))
    texts, seconds = (1, _QUICK_HTTP_SECONDS) if quick else (_TEXTS_IN_A_REQUEST, _HTTP_SECONDS)
    settings = {name: os.environ[name] for name in _KEPT if name in os.environ}
    places = [str(REPOSITORY), *filter(None, [settings.get("PYTHONPATH")])]
    settings |= {
        "EMBEDDING_MODEL": str(folder),
        "RERANKER_MODEL": NO_RERANKER,
        "DEVICE": device,
        "DTYPE": "auto",
        "PYTHONPATH": os.pathsep.join(places),
    }
    with (
        TemporaryDirectory() as temporary,
        run_server(Path(temporary), **settings) as server,
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        clients = [pool.submit(client, server.url, texts, seconds) for _ in range(processes)]
        answered = sum(each.result() for each in clients)
    requests = answered / seconds
    return {
        "tokens_per_text": _LENGTH,
        "connections": processes * _CONNECTIONS,
        "requests_per_second": requests,
        "texts_per_second": requests * texts,
        "tokens_per_second": requests * texts * _LENGTH,
    }


def main() -> None:
    """Measure one section and print it."""
    sections: dict[str, Callable[..., Any]] = {
        "engines": lambda *given, quick: asyncio.run(engines(*given, quick=quick)),
        "rate": lambda *given, quick: asyncio.run(
            engines(*given, quick=quick, dtype=chosen.dtype, alone=True)
        ),
        "kernels": kernels,
        "reranker-kernels": lambda *given, quick: kernels(*given, quick=quick, of_reranker=True),
        "http-rate": http_rate,
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("section", choices=sections)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="few short texts, and less time")
    parser.add_argument("--dtype", default="auto", help="DTYPE of the section rate")
    chosen = parser.parse_args()
    measure, folder = sections[chosen.section], chosen.folder.resolve()
    print(json.dumps(measure(folder, chosen.device, quick=chosen.quick)))


if __name__ == "__main__":
    main()
