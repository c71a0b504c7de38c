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

# In bytes: the alignment of a result in pinned memory, and the smallest buffer.
_ALIGNMENT = 64
_MIN_BUFFER_BYTES = 2**20
# As many as batches in flight, each of which has one.
_MAX_BUFFERS = 2
# Tokens of a forward that takes a large GPU two milliseconds.
_SHORT_FORWARD = 1024


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """`values` `[rows, ...]` on the device; `check` `[rows]` is finite if its whole row is."""

    values: Tensor
    check: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "DeviceRows":
        """Check rows by their sums, which are not finite if a number is not."""
        return cls(values, values if values.dim() == 1 else values.sum(dim=-1))


@dataclass(frozen=True, slots=True)
class HostRows:
    """`values` `[rows, ...]` float32 on the host; `finite` `[rows]` says if a whole row is."""

    values: FloatArray
    finite: npt.NDArray[np.bool_]


def never_finite_error(model: str) -> StartupError:
    """The error for a model of which no result is finite."""
    return StartupError(
        f"the model {model} computes nothing but numbers that are not finite: its weights or its "
        "configuration are damaged, or the range of DTYPE is too small for it"
    )


def not_finite_error() -> InferenceError:
    """The error in place of a result with a number that is not finite."""
    return InferenceError("the model returned a number that is not finite")


def start_copies(results: Sequence[DeviceRows], tokens: int) -> Callable[[], list[HostRows]]:
    """Copy results to the host; returns a function that waits for them, once, in any thread.

    They are those of a forward of so many `tokens`.
    """
    if results[0].values.device.type == "cuda":
        return _start_copies_from_cuda(results, is_short=tokens <= _SHORT_FORWARD)
    arrived = [_on_host(rows.values.cpu(), rows.check.cpu()) for rows in results]
    return lambda: arrived


def _on_host(values: Tensor, check: Tensor, *, copy: bool = False) -> HostRows:
    """The rows, which are on the host already; with `copy` in memory of their own."""
    if copy or values.dtype is not torch.float32:
        values = empty_in_large_pages(values.shape, torch.float32).copy_(values)
    return HostRows(values.numpy(), np.isfinite(check.float().numpy()))


def _start_copies_from_cuda(
    results: Sequence[DeviceRows], *, is_short: bool
) -> Callable[[], list[HostRows]]:
    tensors = [each for rows in results for each in (rows.values, rows.check)]
    device = tensors[0].device
    free, stream = buffers_and_stream(device)
    starts = [0, *accumulate(-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in tensors)]
    buffer = take_buffer(free, starts.pop())
    copies = [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
    # On a stream of their own: the next batch's kernels need not wait for the copies. Those of a
    # short forward take no longer than a change of the stream.
    own = torch.cuda.current_stream(device)
    if not is_short:
        stream.wait_stream(own)
        own = stream
    with torch.cuda.stream(None if is_short else stream):
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
    if not is_short:
        for tensor in tensors:
            # Its memory must not be given to another tensor before it is copied.
            tensor.record_stream(stream)
    # The thread that waits sleeps, and leaves its core to others. Waking it takes an eighth of the
    # time of a lone query: for a short forward, the last in flight, it looks again and again.
    copied = torch.cuda.Event(blocking=not is_short)  # type: ignore[no-untyped-call]
    copied.record(own)

    def collect() -> list[HostRows]:
        copied.synchronize()
        pairs = zip(copies[::2], copies[1::2], strict=True)
        arrived = [_on_host(values, check, copy=True) for values, check in pairs]
        free.append(buffer)
        return arrived

    return collect


def take_buffer(free: deque[Tensor], size: int) -> Tensor:
    """A buffer of pinned memory of at least `size` bytes, a `free` one if it is large enough.

    Allocating one blocks the launching thread for milliseconds. The buffer of a batch that is never
    collected is lost and replaced.
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
    """The free buffers and the stream of all copies from this device."""
    return deque(maxlen=_MAX_BUFFERS), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
