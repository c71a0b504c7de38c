"""Measure one checkpoint on a device and print JSON; `benchmarks.gpu.report` runs the sections.

    python -m benchmarks.gpu.sections engines FOLDER --device cuda
    python -m benchmarks.gpu.sections rate FOLDER --device cuda --dtype float8

- `engines`: tokens a second of this engine and of FlagEmbedding for each text length; milliseconds
  of a single query, the token budget, and memory.
- `rate`: only this engine, at 256 tokens, in any number format (`--dtype`).
- `kernels`: PyTorch's profile of one query and of a batch.
- `http-rate`: tokens a second over HTTP of one service process, with clients in other processes
  that ask for safetensors.
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
from benchmarks.workload import QUERIES, Lengths, draw_texts
from smart_embedder.core import EngineCore
from smart_embedder.requests import EmbedRequest, Outputs
from smart_embedder.settings import NO_RERANKER, EngineSettings
from smart_embedder.startup import load_models
from smart_embedder.vectors import OutputDtype
from tests.support.server import REPOSITORY, run_server

Figures = dict[str, Any]

# ---- this engine and FlagEmbedding

# Tokens of a text, and of all texts of one length; those of `--quick`. The texts are drawn once and
# repeated, so that the engine runs for seconds.
_LENGTHS, _TOKENS = (256, 32, 1024, 8192), 524_288
_QUICK_LENGTHS, _QUICK_TOKENS = (32, 128, 256, 512), 16_384
_REPEATED = 4
# The length of the aims, which comes first.
_LENGTH = 256
# For each case: whether sparse and ColBERT vectors are requested, too, and the number type.
_KINDS: dict[str, tuple[bool, OutputDtype]] = {
    "dense": (False, "float32"),
    "all kinds": (True, "float32"),
    "all kinds, int8": (True, "int8"),
}
# Limits of one call of `embed`.
_TEXTS_IN_A_CALL, _TOKENS_IN_A_CALL = 256, 32_768
# Concurrent calls, with more tokens than the device has in flight; each slot makes at least
# `_ANSWERED` calls.
_CALLS, _ANSWERED = 32, 4
_SAMPLE_SECONDS = 0.002
# No further length begins after it.
_SECONDS = 80.0
_QUERIES = 100
_ROUNDS = 2
# FlagEmbedding gets an eighth of the texts: its rate hardly depends on their number.
_PEER_SHARE = 8
_PEER_BATCH_TOKENS = 32_768


async def measure_rate(
    engine: EngineCore,
    computed: Callable[[], float],
    texts: list[str],
    length: int,
    dtype: OutputDtype,
    *,
    every_kind: bool,
) -> float:
    """Return tokens a second of texts of `length` tokens, while many calls wait.

    The rate is that of the tokens that the engine has `computed`, batch after batch. Responses
    would give another rate, because concurrent calls are computed in parts. The first quarter does
    not count: the device waits for the first texts to be tokenized.
    """
    limits = _TEXTS_IN_A_CALL, _TOKENS_IN_A_CALL // length, len(texts) // (_ANSWERED * _CALLS)
    size = max(1, min(limits))
    calls = iter([texts[start : start + size] for start in range(0, len(texts), size)])
    outputs = Outputs(dense=True, sparse=every_kind, colbert=every_kind)
    samples = [(time.perf_counter(), computed())]

    async def keep_calling() -> None:
        for call in calls:
            await engine.embed(EmbedRequest(call, outputs, output_dtype=dtype))

    def sample() -> None:
        if (tokens := computed()) > samples[-1][1]:
            samples.append((time.perf_counter(), tokens))

    async def keep_sampling() -> None:
        while True:
            sample()
            await asyncio.sleep(_SAMPLE_SECONDS)

    sampling = asyncio.create_task(keep_sampling())
    await asyncio.gather(*(keep_calling() for _ in range(_CALLS)))
    sampling.cancel()
    sample()
    (start, before), (end, after) = samples[len(samples) // 4], samples[-1]
    return (after - before) / (end - start)


def load_peer(folder: Path, device: str) -> Any:
    """Load FlagEmbedding on the same device, in its default of float16 on a GPU."""
    try:
        from benchmarks.adapters import flag_embedding  # noqa: PLC0415 - slow, may be missing

        return flag_embedding.Adapter(folder, "", device)
    except (ImportError, RuntimeError) as error:
        print(f"FlagEmbedding cannot be compared: {error}", file=sys.stderr)
        return None


def measure_peer_rate(peer: Any, texts: list[str], length: int, *, every_kind: bool) -> float:
    """Return tokens a second of texts of `length` tokens, all in one call."""
    started = time.perf_counter()
    peer.encode(texts, Setting(max(1, _PEER_BATCH_TOKENS // length)), every_kind=every_kind)
    return length * len(texts) / (time.perf_counter() - started)


async def measure_rates(
    engine: EngineCore,
    computed: Callable[[], float],
    peer: Any,
    lengths: Sequence[int],
    tokens: int,
) -> list[Figures]:
    """Measure each length and case; of FlagEmbedding, the better of two rounds counts.

    On a slow device the longest texts are left out.
    """
    rows: list[Figures] = []
    end = time.monotonic() + _SECONDS
    for length in lengths:
        texts = draw_texts(Lengths(length, length), max(1, tokens // length))
        fewer = texts[: max(1, len(texts) // _PEER_SHARE)]
        for name, (every_kind, dtype) in _KINDS.items():
            if time.monotonic() > end:
                return rows
            rate = await measure_rate(
                engine, computed, texts * _REPEATED, length, dtype, every_kind=every_kind
            )
            row = {"tokens": length, "kinds": name, "tokens_per_second": rate}
            if peer is not None and dtype == "float32":
                peer_rates = [
                    measure_peer_rate(peer, fewer, length, every_kind=every_kind)
                    for _ in range(_ROUNDS)
                ]
                row |= {"flagembedding": max(peer_rates), "ratio": rate / max(peer_rates)}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


async def measure_query(engine: EngineCore) -> dict[str, float]:
    """Measure the latency of dense vectors of one query after the other."""
    latencies = []
    for text in draw_texts(QUERIES, _QUERIES):
        started = time.perf_counter()
        await engine.embed(EmbedRequest([text]))
        latencies.append(1000 * (time.perf_counter() - started))
    p50, p95 = np.percentile(latencies, (50, 95))
    return {"p50_ms": float(p50), "p95_ms": float(p95), "min_ms": min(latencies)}


def peak_memory() -> dict[str, int]:
    """Return the peaks of the GPU memory of PyTorch, in bytes."""
    if not torch.cuda.is_available():
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated": allocated, "reserved": reserved}


async def measure_engines(
    folder: Path, device: str, *, quick: bool, dtype: str = "auto", alone: bool = False
) -> Figures:
    """Measure the start, a query, and the rates of both, or only of this engine at one length."""
    settings = EngineSettings(
        embedding_model=str(folder),
        reranker_model="none",
        device=device,
        dtype=dtype,
    )
    lengths: Sequence[int] = _QUICK_LENGTHS if quick else _LENGTHS
    if alone:
        lengths = (_LENGTH,)
    started, metrics = time.perf_counter(), Metrics()
    async with EngineCore(settings, load_models, metrics=metrics) as engine:
        models = engine.loaded()

        def computed() -> float:
            labels = {"model": models.embedder.name}
            return metrics.registry.get_sample_value("embedder_tokens_processed_total", labels) or 0

        figures: Figures = {
            "torch": torch.__version__,
            "start_seconds": time.perf_counter() - started,
            "max_batch_tokens": models.max_batch_tokens,
            "dtype": models.device.dtype,
            "attention": models.device.attention,
            "paths": models.infos[0].paths,
            "refused": [f"{proof.operation}: {proof.path}" for proof in models.infos[0].refused],
            "lone_query": await measure_query(engine),
        }
        before = peak_memory()
        peer = None if alone else load_peer(folder, device)
        tokens = _QUICK_TOKENS if quick else _TOKENS
        figures["rates"] = await measure_rates(engine, computed, peer, lengths, tokens)
    return figures | {"memory_before_load": before, "memory": peak_memory()}


# ---- forwards of one model

_SIZES = {"one query": (1, 16), "a batch": (64, 256)}
_QUICK_SIZES = {"one query": (1, 16), "a batch": (8, 64)}
_MAX_KERNELS = 12
_DENSE = Outputs(dense=True)


def make_forward(model: Any, texts: int, length: int) -> Callable[[], object]:
    """Return a function that runs a forward of random texts."""
    ids = list(np.random.default_rng(0).integers(5, 100, (texts, length)))

    def run() -> None:
        model.launch(ids, [_DENSE] * texts)()

    return run


def profile_kernels(run: Callable[[], object], *, cuda: bool) -> Figures:
    """Profile the kernels of one forward, after two for warming up."""
    run()
    run()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        run()
    device = "CUDA" if cuda else "CPU"
    microseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type.name == device:
            microseconds[event.name] += (
                event.device_time_total if cuda else event.self_cpu_time_total
            )
            calls[event.name] += 1
    return {
        "launches": calls.total(),
        "microseconds": microseconds.total(),
        "kernels": [
            {"name": name[:100], "calls": calls[name], "microseconds": round(total, 1)}
            for name, total in microseconds.most_common(_MAX_KERNELS)
        ],
    }


def measure_kernels(folder: Path, device: str, *, quick: bool) -> Figures:
    """Profile the forwards of a query and of a batch."""
    models = load_models(
        EngineSettings(embedding_model=str(folder), reranker_model=NO_RERANKER, device=device)
    )
    placed = models.models[-1].models[0]
    model, on = placed.model, placed.device
    cuda = on.gpu_available and torch.cuda.is_available()
    return {
        name: {"tokens": texts * length}
        | profile_kernels(make_forward(model, texts, length), cuda=cuda)
        for name, (texts, length) in (_QUICK_SIZES if quick else _SIZES).items()
    }


# ---- over HTTP

_TEXTS_IN_A_REQUEST = 32
_CONNECTIONS = 8
# Seconds before the measurement, in which each connection sends at least one request.
_WARM_UP = 2.0
_HTTP_SECONDS, _QUICK_HTTP_SECONDS = 15.0, 5.0
# The service needs these for packages in another folder.
_PASSED_ON = ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")


def send_requests(url: str, texts: int, seconds: float) -> int:
    """Send requests on several connections; return how many were answered within `seconds`."""
    sentences = draw_texts(Lengths(_LENGTH, _LENGTH), 4 * texts)
    dense_only = {"return_sparse": False, "return_colbert": False}
    bodies = [
        json.dumps({"sentences": sentences[first : first + texts]} | dense_only).encode()
        for first in range(0, len(sentences), texts)
    ]
    start, answered = time.monotonic() + _WARM_UP, 0

    async def keep_sending(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal answered
        while (now := time.monotonic()) < start + seconds:
            body = bodies[number % len(bodies)]
            async with session.post(f"{url}/embeddings/", data=body) as response:
                response.raise_for_status()
                await response.read()
            answered += now >= start and time.monotonic() < start + seconds
            number += 1

    async def run() -> None:
        headers = {"Content-Type": "application/json", "Accept": SAFETENSORS}
        async with aiohttp.ClientSession(headers=headers) as session:
            calls = (keep_sending(session, first) for first in range(_CONNECTIONS))
            await asyncio.gather(*calls)

    asyncio.run(run())
    return answered


def measure_http_rate(folder: Path, device: str, *, quick: bool) -> Figures:
    """Start a service and send requests from several processes."""
    processes = max(1, min(6, (os.cpu_count() or 1) // 2))
    texts, seconds = (1, _QUICK_HTTP_SECONDS) if quick else (_TEXTS_IN_A_REQUEST, _HTTP_SECONDS)
    settings = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    paths = [str(REPOSITORY), *filter(None, [settings.get("PYTHONPATH")])]
    settings |= {
        "EMBEDDING_MODEL": str(folder),
        "RERANKER_MODEL": NO_RERANKER,
        "DEVICE": device,
        "DTYPE": "auto",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with (
        TemporaryDirectory() as temporary,
        run_server(Path(temporary), **settings) as server,
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        clients = [pool.submit(send_requests, server.url, texts, seconds) for _ in range(processes)]
        answered = sum(client.result() for client in clients)
    requests = answered / seconds
    return {
        "tokens_per_text": _LENGTH,
        "connections": processes * _CONNECTIONS,
        "requests_per_second": requests,
        "texts_per_second": requests * texts,
        "tokens_per_second": requests * texts * _LENGTH,
    }


def main() -> None:
    """Measure one section and print its figures."""
    sections: dict[str, Callable[..., Any]] = {
        "engines": lambda *args, quick: asyncio.run(measure_engines(*args, quick=quick)),
        "rate": lambda *args, quick: asyncio.run(
            measure_engines(*args, quick=quick, dtype=options.dtype, alone=True)
        ),
        "kernels": measure_kernels,
        "http-rate": measure_http_rate,
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("section", choices=sections)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="few short texts, and less time")
    parser.add_argument("--dtype", default="auto", help="DTYPE, for the section rate")
    options = parser.parse_args()
    measure, folder = sections[options.section], options.folder.resolve()
    print(json.dumps(measure(folder, options.device, quick=options.quick)))


if __name__ == "__main__":
    main()
