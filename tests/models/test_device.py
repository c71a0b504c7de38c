"""Every model on the machine's own accelerator against the CPU in float32; without one, on the CPU.

`pytest -m device` runs what needs a real device to be shown.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from smart_embedder.engine.records import Outputs
from smart_embedder.models.device.choose import choose_device, choose_dtype
from smart_embedder.models.families.backbone import Target
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.tasks.cross_encoder import load_cross_encoder
from smart_embedder.models.tasks.dense import load_dense_embedder, load_m3_embedder
from smart_embedder.models.tasks.qwen3 import load_qwen_reranker

pytestmark = pytest.mark.device
CPU, DEVICE = torch.device("cpu"), choose_device("auto")
_IDS = 4096
LENGTHS = (1, 3, 17, 17, 60, 130)
EVERY_KIND = [
    Outputs(dense, sparse, colbert)
    for dense in (False, True)
    for sparse in (False, True)
    for colbert in (False, True)
    if dense or sparse or colbert
]


def target(device: torch.device, *, qwen: bool = False) -> Target:
    dtype = torch.float32 if device is CPU else choose_dtype("auto", device, qwen=qwen)
    return Target(device, dtype, choose_backend(device, dtype))


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    begin = rng.integers(5, 90, 9)
    return [
        np.concatenate([begin, rng.integers(5, 90, length)]) if length > 3 else begin[:length]
        for length in LENGTHS
    ]


def numbers(result: object) -> np.ndarray:
    """All numbers of an embedding, or a score."""
    if isinstance(result, float):
        return np.array([result])
    each = (result.dense, result.colbert)
    parts = [np.ravel(part) for part in each if part is not None]
    if result.sparse is not None:  # A weight near 0 may be left out in one number format alone.
        parts.append(np.bincount(result.sparse.indices, result.sparse.values, minlength=_IDS))
    return np.concatenate(parts)


def compare(load: Callable[[Target], object], *, qwen: bool, outputs: list[Outputs]) -> None:
    """Two batches in flight, each with every selection of kinds, against lonely requests."""
    texts = sequences()
    chosen = [outputs[place % len(outputs)] for place in range(len(texts))]
    fast, plain = load(target(DEVICE, qwen=qwen)), load(target(CPU))
    first, second = fast.launch(texts, chosen), fast.launch(texts[::-1], chosen[::-1])
    expected = [plain.forward([text], kinds)[0] for text, kinds in zip(texts, chosen, strict=True)]
    for results in (first(), second()[::-1]):
        for mine, exact in zip(results, expected, strict=True):
            np.testing.assert_allclose(numbers(mine), numbers(exact), rtol=0.05, atol=0.05)


def test_bge_m3_with_every_selection_of_kinds(tiny_m3: Path) -> None:
    compare(
        lambda where: load_m3_embedder("m3", tiny_m3, 512, where), qwen=False, outputs=EVERY_KIND
    )


def test_bge_reranker(tiny_reranker: Path) -> None:
    load = lambda where: load_cross_encoder("reranker", tiny_reranker, 512, where)  # noqa: E731
    compare(load, qwen=False, outputs=[Outputs(dense=True)])


def test_qwen_embedder_with_shared_beginnings(tiny_qwen: Path) -> None:
    load = lambda where: load_dense_embedder("qwen", tiny_qwen, 512, where)  # noqa: E731
    compare(load, qwen=True, outputs=[Outputs(dense=True)])


def test_qwen_reranker_with_shared_beginnings(tiny_qwen: Path) -> None:
    load = lambda where: load_qwen_reranker("qwen", tiny_qwen, 512, 16, where)  # noqa: E731
    compare(load, qwen=True, outputs=[Outputs(dense=True)])
