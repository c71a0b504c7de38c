"""What bge-m3's outputs take, and the most that the machine reaches: a product of two matrices.

An engine's share of that tells how well it uses the hardware, which texts per second do not. A
product of `[m, k]` and `[k, n]` counts 2mkn operations. Softmax, norms, activations and padding are
left out: they are a small part, no matrix unit computes them, or an engine may avoid them.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

# FLOP/s in each precision.
Ceilings = dict[str, float]

# (rows, inner, columns): what a forward of 1,024 tokens multiplies, and two squares.
SHAPES = ((1024, 1024, 4096), (1024, 4096, 1024), (2048, 2048, 2048), (4096, 4096, 4096))


@dataclass(frozen=True, slots=True)
class Encoder:
    """The sizes of an XLM-RoBERTa encoder that decide its cost."""

    hidden: int
    layers: int
    inner: int

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The sizes in a checkpoint's config.json."""
        config = json.loads((folder / "config.json").read_text())
        return cls(config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"])

    def flop(self, lengths: Iterable[int], *, heads: bool = True) -> int:
        """Of texts with that many tokens, with or without the sparse and the ColBERT head."""
        # Four projections of attention, two of the feed-forward.
        linear = 4 * self.hidden * self.hidden + 2 * self.hidden * self.inner
        total = 0
        for length in lengths:
            scores_and_values = 2 * length * self.hidden
            total += length * (linear + scores_and_values) * self.layers
            if heads:
                total += length * self.hidden + (length - 1) * self.hidden * self.hidden
        return 2 * total


def measure_ceilings(
    seconds: float = 0.5, shapes: Sequence[tuple[int, int, int]] = SHAPES
) -> Ceilings:
    """FLOP/s of the best shape in each precision, each shape running for at least `seconds`.

    A precision that this build of PyTorch cannot multiply in is left out.
    """
    best: Ceilings = {}
    for (name, make), shape in product(PRODUCTS.items(), shapes):
        with suppress(AttributeError, RuntimeError):
            best[name] = max(best.get(name, 0.0), _rate(make(*shape), shape, seconds))
    return best


def _rate(multiply: Callable[[], object], shape: tuple[int, int, int], seconds: float) -> float:
    multiply()
    runs, elapsed, started = 0, 0.0, time.perf_counter()
    while not runs or elapsed < seconds:
        multiply()
        runs += 1
        elapsed = time.perf_counter() - started
    rows, inner, columns = shape
    return 2 * rows * inner * columns * runs / elapsed


def _floating(dtype: torch.dtype) -> Callable[[int, int, int], Callable[[], Tensor]]:
    def make(rows: int, inner: int, columns: int) -> Callable[[], Tensor]:
        states = torch.randn(rows, inner, dtype=dtype)
        weight = torch.randn(columns, inner, dtype=dtype)
        return lambda: functional.linear(states, weight)

    return make


def _int8(rows: int, inner: int, columns: int) -> Callable[[], Tensor]:
    """What PyTorch's quantized linear layer calls: the fastest 8-bit product that it has."""
    states = torch.randint(0, 255, (rows, inner), dtype=torch.uint8)
    weight = torch.randint(-127, 127, (columns, inner), dtype=torch.int8)
    scales, zeros = torch.ones(columns), torch.zeros(columns, dtype=torch.int64)
    packed = torch.ops.onednn.qlinear_prepack(weight, [rows, inner])
    tail: Any = (packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], "")
    return lambda: torch.ops.onednn.qlinear_pointwise(states, 1.0, 128, *tail)


PRODUCTS: dict[str, Callable[[int, int, int], Callable[[], Tensor]]] = {
    "float32": _floating(torch.float32),
    "bfloat16": _floating(torch.bfloat16),
    "int8": _int8,
}
