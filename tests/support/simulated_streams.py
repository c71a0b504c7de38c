"""Stand-ins for CUDA's streams, events and graphs: the order in which things happen, checked."""

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.support.simulated_cuda import SimulatedCuda

# What a copy to the host holds once it has happened.
ARRIVED = 0.5


class CudaMisuseError(AssertionError):
    """What would go wrong, or slowly, on a real device."""


class Stream:
    """Remembers how far it has come, and how far it has waited for others."""

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
    """Brings what its stream had copied when it was recorded, once it is waited for."""

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
        # Made in another thread's inference mode.
        with torch.inference_mode():
            self.target.fill_(ARRIVED)
        self.done = True

    def overlaps(self, other: Tensor) -> bool:
        mine, others = (
            (each.data_ptr(), each.data_ptr() + each.nbytes) for each in (self.target, other)
        )
        return mine[0] < others[1] and others[0] < mine[1]


class Graph:
    """Captures launches instead of making them, and launches them together."""

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
