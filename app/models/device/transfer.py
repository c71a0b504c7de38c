"""Bringing results back from the device, beside what it computes next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.engine.types import FloatArray
from app.errors import InferenceError


@dataclass(frozen=True, slots=True)
class HostRows:
    """`values` `[rows, ...]` float32 on the host; `finite` `[rows]`: whether all of a row is."""

    values: FloatArray
    finite: npt.NDArray[np.bool_]


def start_copies(tensors: Sequence[Tensor]) -> Callable[[], list[HostRows]]:
    """Begin to bring float32 tensors `[rows, ...]` of one device to the host.

    What is returned waits for them and may be called in any thread.
    """
    # A row's sum is not finite as soon as one number is not: a look at each without a copy of any.
    sums = [tensor if tensor.dim() == 1 else tensor.sum(dim=-1) for tensor in tensors]
    copies, synchronize = _copy([*sums, *tensors])

    def collect() -> list[HostRows]:
        synchronize()
        arrays = [copy.numpy() for copy in copies]
        return [
            HostRows(values, np.isfinite(row_sums))
            for row_sums, values in zip(arrays[: len(sums)], arrays[len(sums) :], strict=True)
        ]

    return collect


def not_finite() -> InferenceError:
    """What stands in the place of a result with a number that is not finite."""
    return InferenceError("the model returned a number that is not finite")


def _copy(tensors: list[Tensor]) -> tuple[list[Tensor], Callable[[], object]]:
    """The tensors on the host, to be read once the function beside them has returned."""
    device = tensors[0].device
    if device.type != "cuda":
        return [tensor.cpu() for tensor in tensors], lambda: None
    # A stream of its own: the next batch's kernels need not wait for the copies.
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    for tensor in tensors:
        # Its memory must not be given to another tensor before it is copied.
        tensor.record_stream(stream)
    # Blocking: the thread that waits sleeps, and leaves its core to others.
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record(stream)
    return copies, copied.synchronize


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
