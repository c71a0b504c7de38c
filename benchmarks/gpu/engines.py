"""This engine and FlagEmbedding in turns in one process, text length by text length.

    python -m benchmarks.gpu.engines FOLDER --device cuda

Prints JSON: for each length and for dense vectors and all kinds the tokens a second of both, and
their ratio; a lone query's milliseconds; the token budget that the start chose; memory.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.workload import QUERIES, Lengths, draw_texts
from smart_embedder.engine import EmbedRequest, Engine
from smart_embedder.engine.records import Outputs
from smart_embedder.models.load import load_models
from smart_embedder.settings import Settings

# Tokens of a text, and of all texts of one length; those of a rehearsal on a CPU.
_LENGTHS, _TOKENS = (32, 128, 256, 512, 2048, 8192), 262_144
_QUICK_LENGTHS, _QUICK_TOKENS = (32, 128, 256, 512), 2048
# The names of what is asked for, and whether that is more than dense vectors.
_KINDS = {"dense": False, "all kinds": True}
# Texts in one call of `embed`: several are in the queue, so that the device need not wait for one.
_TEXTS_IN_A_CALL = 256
_LEAST_CALLS = 8
_ROUNDS = 2
# After which no other length is begun, so that there are figures at all.
_SECONDS = 110.0
_QUERIES = 100
# FlagEmbedding pads, and its rate hardly depends on how many texts there are.
_PEERS_SHARE = 4


async def own_seconds(engine: Engine, texts: list[str], *, every_kind: bool) -> float:
    """For all texts, in calls that wait at the same time."""
    at_once = max(1, min(_TEXTS_IN_A_CALL, len(texts) // _LEAST_CALLS))
    calls = [texts[start : start + at_once] for start in range(0, len(texts), at_once)]
    began = time.perf_counter()
    outputs = Outputs(dense=True, sparse=every_kind, colbert=every_kind)
    await asyncio.gather(*(engine.embed(EmbedRequest(call, outputs)) for call in calls))
    return time.perf_counter() - began


def load_peer(folder: Path, device: str) -> Any:
    """FlagEmbedding on the same files and device; in float16 on a GPU, as is its default."""
    try:
        from FlagEmbedding import BGEM3FlagModel  # noqa: PLC0415 - seconds, and may be missing

        return BGEM3FlagModel(str(folder), use_fp16=device != "cpu", devices=device)
    except (ImportError, RuntimeError) as error:
        print(f"FlagEmbedding cannot be compared: {error}", file=sys.stderr)
        return None


def peer_seconds(peer: Any, texts: list[str], *, every_kind: bool) -> float:
    """For all texts in one call, as its users make it."""
    began = time.perf_counter()
    peer.encode(
        texts,
        batch_size=max(1, 32 * 1024 // max(map(len, texts))),
        max_length=8192,
        return_dense=True,
        return_sparse=every_kind,
        return_colbert_vecs=every_kind,
    )
    return time.perf_counter() - began


async def rates(engine: Engine, peer: Any, *, quick: bool) -> list[dict[str, Any]]:
    """One row for each length and selection of kinds; the best of the rounds of each engine.

    On a slow device the longest texts are left out.
    """
    rows: list[dict[str, Any]] = []
    ends = time.monotonic() + _SECONDS
    tokens = _QUICK_TOKENS if quick else _TOKENS
    for length in _QUICK_LENGTHS if quick else _LENGTHS:
        texts = draw_texts(Lengths(length, length), max(1, tokens // length))
        fewer = texts[: max(1, len(texts) // _PEERS_SHARE)]
        for name, every_kind in _KINDS.items():
            if time.monotonic() > ends:
                return rows
            own, other = [], []
            for _ in range(_ROUNDS):
                seconds = await own_seconds(engine, texts, every_kind=every_kind)
                own.append(length * len(texts) / seconds)
                if peer is not None:
                    seconds = peer_seconds(peer, fewer, every_kind=every_kind)
                    other.append(length * len(fewer) / seconds)
            row = {"tokens": length, "kinds": name, "tokens_per_second": max(own)}
            if other:
                row |= {"flagembedding": max(other), "ratio": max(own) / max(other)}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


async def lone_query(engine: Engine) -> dict[str, float]:
    """Milliseconds of one query after the other, dense vectors alone."""
    took = []
    for text in draw_texts(QUERIES, _QUERIES):
        began = time.perf_counter()
        await engine.embed(EmbedRequest([text]))
        took.append(1000 * (time.perf_counter() - began))
    quantiles = statistics.quantiles(took, n=20)
    return {"p50_ms": statistics.median(took), "p95_ms": quantiles[-1], "min_ms": min(took)}


def memory() -> dict[str, int]:
    """Bytes at their peak, of the GPU's memory that PyTorch asked for."""
    if not torch.cuda.is_available():
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated": allocated, "reserved": reserved}


async def measure(folder: Path, device: str, *, quick: bool) -> dict[str, Any]:
    """Everything that this program prints."""
    settings = Settings(
        embedding_model=str(folder), reranker_model="none", device=device, request_timeout=600
    )
    began = time.perf_counter()
    async with Engine(settings, load_models) as engine:
        models = engine.loaded()
        assert models is not None
        found: dict[str, Any] = {
            "start_seconds": time.perf_counter() - began,
            "max_batch_tokens": models.max_batch_tokens,
            "seconds_per_token": models.seconds_per_token,
            "dtype": models.device.dtype,
            "attention": models.device.attention,
            "paths": models.infos[0].paths,
            "refused": [f"{each.operation}: {each.path}" for each in models.infos[0].refused],
            "lone_query": await lone_query(engine),
        }
        alone = memory()
        found["rates"] = await rates(engine, load_peer(folder, device), quick=quick)
    return found | {"memory_before_load": alone, "memory": memory()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="few short texts")
    arguments = parser.parse_args()
    folder, device = arguments.folder.resolve(), arguments.device
    print(json.dumps(asyncio.run(measure(folder, device, quick=arguments.quick))))


if __name__ == "__main__":
    main()
