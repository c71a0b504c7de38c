"""Copies results from the device to the host while the device computes the next batch."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from smart_embedder.errors import InferenceError, StartupError
from smart_embedder.hardware.cpu import empty_in_large_pages
from smart_embedder.results import FloatArray

# The alignment, in bytes, of a result in pinned memory.
_ALIGNMENT = 64
_MIN_BUFFER_BYTES = 2**20
# Each batch in flight has a buffer, and there are at most two.
_MAX_BUFFERS = 2
# The tokens of a forward that takes two milliseconds on a large GPU.
_SHORT_FORWARD = 1024


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Results `values` `[rows, ...]` on the device.

    A row's number in `check` `[rows]` is finite if all numbers of the row are.
    """

    values: Tensor
    check: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "DeviceRows":
        """Use the rows' sums as `check`: a sum is not finite if one of its numbers is not."""
        return cls(values, values if values.dim() == 1 else values.sum(dim=-1))


@dataclass(frozen=True, slots=True)
class HostRows:
    """Results `values` `[rows, ...]` float32 on the host.

    `finite` `[rows]` is true for rows in which all numbers are finite.
    """

    values: FloatArray
    finite: npt.NDArray[np.bool_]


def never_finite_error(model: str) -> StartupError:
    """Make the error for a model that computes no finite number."""
    return StartupError(
        f"the model {model} computes nothing but numbers that are not finite: its weights or its "
        "configuration are damaged, or the range of DTYPE is too small for it"
    )


def not_finite_error() -> InferenceError:
    """Make the error that replaces a result with a number that is not finite."""
    return InferenceError("the model returned a number that is not finite")


def start_copies(results: Sequence[DeviceRows], tokens: int) -> Callable[[], list[HostRows]]:
    """Start to copy the results of a forward of `tokens` tokens to the host.

    Returns a function that waits for the copies and returns them. It is called once, in any thread.
    """
    if results[0].values.device.type == "cuda":
        return _start_copies_from_cuda(results, is_short=tokens <= _SHORT_FORWARD)
    copied = [_to_host_rows(rows.values.cpu(), rows.check.cpu()) for rows in results]
    return lambda: copied


def _to_host_rows(values: Tensor, check: Tensor, *, copy: bool = False) -> HostRows:
    """Convert tensors on the host to float32; with `copy`, always into new memory."""
    if copy or values.dtype is not torch.float32:
        values = empty_in_large_pages(values.shape, torch.float32).copy_(values)
    return HostRows(values.numpy(), np.isfinite(check.float().numpy()))


def _start_copies_from_cuda(
    results: Sequence[DeviceRows], *, is_short: bool
) -> Callable[[], list[HostRows]]:
    tensors = [tensor for rows in results for tensor in (rows.values, rows.check)]
    device = tensors[0].device
    free, stream = buffers_and_stream(device)
    sizes = (-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
    starts = [0, *accumulate(sizes)]
    buffer = take_buffer(free, starts.pop())
    copies = [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
    # A separate stream, so that the next batch's kernels need not wait for the copies. For a short
    # forward the change of stream would take as long as the copies.
    current = torch.cuda.current_stream(device)
    if not is_short:
        stream.wait_stream(current)
        current = stream
    with torch.cuda.stream(None if is_short else stream):
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
    if not is_short:
        for tensor in tensors:
            # The allocator must not reuse the tensor's memory before it is copied.
            tensor.record_stream(stream)
    # A blocking event lets the waiting thread sleep and leaves its core to others. Waking it takes
    # an eighth of the time of a lone query, so for a short forward the thread polls.
    copied = torch.cuda.Event(blocking=not is_short)  # type: ignore[no-untyped-call]
    copied.record(current)

    def collect() -> list[HostRows]:
        copied.synchronize()
        pairs = zip(copies[::2], copies[1::2], strict=True)
        rows = [_to_host_rows(values, check, copy=True) for values, check in pairs]
        free.append(buffer)
        return rows

    return collect


def take_buffer(free: deque[Tensor], size: int) -> Tensor:
    """Take a `free` buffer of pinned memory if it has `size` bytes, or allocate a new one.

    Allocating a buffer blocks the launching thread for milliseconds. If a batch is never collected,
    its buffer is lost, and the next batch allocates another.
    """
    with suppress(IndexError):
        buffer = free.popleft()
        if len(buffer) >= size:
            return buffer
    return torch.empty(
        max(_MIN_BUFFER_BYTES, 1 << (size - 1).bit_length()), dtype=torch.uint8, pin_memory=True
    )


@cache
def buffers_and_stream(device: torch.device) -> tuple[deque[Tensor], torch.cuda.Stream]:
    """Return the free buffers and the stream for all copies from this device."""
    return deque(maxlen=_MAX_BUFFERS), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
