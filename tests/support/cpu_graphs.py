"""CUDA graphs on a CPU, with real numbers: operators are recorded, and repeated in place."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from smart_embedder.kernels.attention import QueryKeyValue, attend_by_length
from smart_embedder.kernels.packed_batch import LengthClass, PackedBatch


class CpuGraph(TorchDispatchMode):
    """Records operators with their arguments, and repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self._captured: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def capture_begin(self, **_: Any) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, result in self._captured:
            _overwrite(result, func(*args, **kwargs))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._captured.append((func, args, kwargs or {}, result))
        return result


def _overwrite(results: Any, again: Any) -> None:
    for old, new in zip(*map(torch.utils._pytree.tree_leaves, (results, again)), strict=True):
        # A result at the same address is a view of an argument, or an argument written in place.
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


@torch.library.custom_op("tests::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Compute `[T, H, D]` for each sequence between two bounds; NaN outside of them."""
    attended = torch.full_like(query, torch.nan).transpose(0, 1).contiguous().transpose(0, 1)
    ends = bounds.tolist()
    for start, stop in pairwise(ends):
        parts = (states[start:stop].transpose(0, 1) for states in (query, key, value))
        positions = torch.arange(stop - start)
        distances = positions[:, None] - positions
        visible = distances.abs() < (window or len(query))
        attended[start:stop] = torch.nn.functional.scaled_dot_product_attention(
            *parts,
            attn_mask=visible & (distances >= 0) if causal else visible,
            scale=scale,
            enable_gqa=True,
        ).transpose(0, 1)
    return attended


def attend_as_on_a_gpu(
    states: QueryKeyValue,
    packed: PackedBatch,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Implement `Attention` with operators that read the lengths from device memory."""

    def attend(query: Tensor, key: Tensor, value: Tensor, part: LengthClass) -> Tensor:
        return torch.ops.tests.attend(query, key, value, part.bounds, scale, causal, window)

    return attend_by_length(attend, states, packed)


@contextmanager
def cpu_graphs(graph: type[CpuGraph] = CpuGraph) -> Iterator[None]:
    """Let `models.cuda_graphs` capture graphs of that class on the CPU, within the block."""
    stream = SimpleNamespace(device=torch.device("cpu"), wait_stream=lambda _: None)
    fakes = {
        "CUDAGraph": graph,
        "graph_pool_handle": lambda: (0, 1),
        "Stream": lambda _: stream,
        "current_stream": lambda _: stream,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda _: None,
    }
    with ExitStack() as stack:
        for name, value in fakes.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        yield
