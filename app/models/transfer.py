"""Bringing results back from the device, beside what it computes next."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from app.errors import InferenceError
from app.jobs import FloatArray


def start_copies(tensors: Sequence[Tensor]) -> Callable[[], list[FloatArray]]:
    """Begin to bring float32 tensors of one device to the host.

    What is returned waits for them and may be called in any thread. It raises `InferenceError`
    where a number is not finite.
    """
    # Not finite as soon as one number is not: a look at every number without a copy of any.
    sums = torch.stack([tensor.sum() for tensor in tensors])
    copies, wait = _copy([sums, *tensors])

    def arrive() -> list[FloatArray]:
        wait()
        if not copies[0].isfinite().all():
            raise InferenceError("the model returned a number that is not finite")
        return [copy.numpy() for copy in copies[1:]]

    return arrive


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
    # Blocking: who waits sleeps, and leaves its core to others.
    arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    arrived.record(stream)
    return copies, arrived.synchronize


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
