"""Fakes of CUDA's streams, events and graphs, which check the order of work."""

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.support.simulated_cuda import SimulatedCuda

# The value of a copy on the host once it has arrived.
ARRIVED = 0.5


class CudaMisuseError(AssertionError):
    """An error, or a slow operation, that would happen on a real device."""


class Stream:
    """Records its own time, and the times of other streams that it has waited for."""

    def __init__(self, device: Any = "cuda:0", **_: Any) -> None:
        self.device = torch.device(device)
        self.time = 0
        self.seen: dict[Stream, int] = {}
        self.copies: list[Arrival] = []

    def wait_stream(self, other: "Stream") -> None:
        self.seen[other] = other.time

    def has_seen(self, stream: "Stream", time: int) -> bool:
        return self is stream or self.seen.get(stream, 0) >= time

    def synchronize(self) -> None:
        raise CudaMisuseError("a stream was waited for by the host")


class Event:
    """When it is waited for, lets the copies of its stream arrive that precede its recording."""

    def __init__(self, *, blocking: bool = False, **_: Any) -> None:
        self.blocking = blocking
        self._copies: list[Arrival] | None = None

    def record(self, stream: Stream) -> None:
        self._copies, stream.copies = stream.copies, []

    def synchronize(self) -> None:
        if self._copies is None:
            raise CudaMisuseError("an event was waited for that was never recorded")
        for copy in self._copies:
            copy.arrive()


class Arrival:
    """A copy to pinned memory that may not have happened yet."""

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self.done = False

    def arrive(self) -> None:
        # Another thread allocated the target in inference mode.
        with torch.inference_mode():
            self.target.fill_(ARRIVED)
        self.done = True

    def overlaps(self, other: Tensor) -> bool:
        tensors = (self.target, other)
        first, second = (
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors
        )
        return first[0] < second[1] and second[0] < first[1]


class Graph:
    """Captures launches instead of running them, and runs them together."""

    def __init__(self, device: "SimulatedCuda") -> None:
        self._device = device
        self.captured: list[tuple[list[Tensor], list[Tensor]]] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        if self._device.current is self._device.main:
            raise CudaMisuseError("a capture needs a stream of its own")
        if capture_error_mode != "thread_local":
            raise CudaMisuseError("a capture would fail when another thread waits for results")
        self._device.capturing = self

    def capture_end(self) -> None:
        self._device.capturing = None

    def replay(self) -> None:
        self._device._note(
            "graph", *map(list, map(chain.from_iterable, zip(*self.captured, strict=True)))
        )
