"""Resident memory of a warm engine, against the weights in the dtype it runs in.

python -m benchmarks.memory FOLDER --reranker RERANKER_FOLDER --dtype bfloat16
"""

import argparse
import asyncio
import threading
from pathlib import Path

import psutil
from safetensors import safe_open

from smart_embedder.engine import Engine
from smart_embedder.models.load import load_models
from smart_embedder.settings import Settings

_BYTES = {"float32": 4, "bfloat16": 2}
_MIB = 2**20


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of the checkpoint's weights in `dtype`."""
    with safe_open(folder / "model.safetensors", framework="numpy") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    return sum(_product(shape) for shape in shapes) * _BYTES[dtype]


def _product(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


async def resident_bytes(folder: Path, reranker: str, dtype: str) -> int:
    """This process's resident memory once the models are warm."""
    settings = Settings.model_validate(
        {
            "embedding_model": str(folder),
            "reranker_model": reranker,
            "device": "cpu",
            "dtype": dtype,
        }
    )
    async with Engine(settings, load_models):
        _wait_for_thread("finish-loading")
        return int(psutil.Process().memory_info().rss)


def _wait_for_thread(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()


def main() -> None:
    """Print the figures and their ratio to the limit of 1.15 x weights + 700 MiB."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkpoint of bge-m3's shape")
    parser.add_argument("--reranker", type=Path, help="a reranker that is loaded, too")
    parser.add_argument(
        "--dtype",
        choices=sorted(_BYTES),
        default="bfloat16",
        help="the number format, as DTYPE (%(default)s)",
    )
    arguments = parser.parse_args()
    folders = [folder for folder in (arguments.folder, arguments.reranker) if folder]
    weights = sum(weight_bytes(folder, arguments.dtype) for folder in folders) / _MIB
    reranker = str(arguments.reranker or "none")
    resident = asyncio.run(resident_bytes(arguments.folder, reranker, arguments.dtype)) / _MIB
    limit = 1.15 * weights + 700
    print(f"weights {weights:.0f} MiB, resident {resident:.0f} MiB, limit {limit:.0f} MiB")


if __name__ == "__main__":
    main()
