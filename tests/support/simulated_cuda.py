"""A CUDA device without a GPU, which checks launches, copies and synchronisations.

Its tensors are PyTorch's fake tensors, with shape, dtype and device but no numbers. Mixing devices
and reading a number raise by themselves. `CudaMisuseError` is raised for what a real device shows
only sometimes, or only by its slowness: a copy from or to memory that is not pinned, a
synchronisation within a forward, a copy that does not wait for the kernels before it. The host gets
the number of the copy as its value, 1 for the first, and NaN until the event after it is waited
for. The device is cuda:0, always with its number.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from smart_embedder.hardware import transfer
from smart_embedder.kernels import proof
from smart_embedder.kernels import target as choose
from smart_embedder.models import cuda_graphs
from smart_embedder.models.families import registry as load
from tests.support.fake_device import crosses, fake_tensors, is_composite, leaves

MEMORY = 80 * 2**30
# Operators that launch nothing: they allocate memory, or reinterpret it. Views are known anyway.
_FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "lift_fresh", "alias", "_unsafe_view", "device"),
}


class CudaMisuseError(AssertionError):
    """An error, or a slow operation, that would happen on a real device."""


class Stream:
    """Knows how many launches it has waited for."""

    def __init__(self, cuda: "SimulatedCuda") -> None:
        self.device = torch.device("cuda:0")
        self._cuda = cuda
        self.waited_for = 0

    def wait_stream(self, _: "Stream") -> None:
        self.waited_for = self._cuda.launches.total()


class Graph:
    """A capture launches nothing, and a replay is one launch."""

    def __init__(self, cuda: "SimulatedCuda") -> None:
        self._cuda = cuda

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        if self._cuda.current is self._cuda.main:
            raise CudaMisuseError("a capture needs a stream of its own")
        if capture_error_mode != "thread_local":
            raise CudaMisuseError("a capture would fail when another thread waits for results")
        self._cuda.capturing = True

    def capture_end(self) -> None:
        self._cuda.capturing = False

    def replay(self) -> None:
        self._cuda.launches["graph"] += 1


class SimulatedCuda(TorchDispatchMode):
    """Counts launches on the device; within `forward` the host must not wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.pinned_blocks = 0
        self.copies = 0
        self.main = self.current = Stream(self)
        self.strict = self.capturing = False
        # By the address of their storage, which stays alive, so that no address is used twice.
        self._pinned: dict[int, Tensor] = {}
        self._not_recorded: dict[int, Tensor] = {}
        self._under_way: list[tuple[Tensor, int]] = []

    @contextmanager
    def forward(self) -> Iterator[Counter[str]]:
        """Yield the launches within; a synchronisation or a missing `record_stream` raises."""
        before, self.strict = self.launches.copy(), True
        within: Counter[str] = Counter()
        try:
            yield within
        finally:
            self.strict = False
        within.update(self.launches - before)
        if self._not_recorded:
            raise CudaMisuseError("memory may be reused while another stream still reads it")

    # Replacements of functions in torch.cuda and of methods of tensors.

    def pin_memory(self, tensor: Tensor, *_: Any) -> Tensor:
        self._pinned[_storage(tensor)] = tensor
        return tensor

    def record_stream(self, tensor: Tensor, _: Stream) -> None:
        self._not_recorded.pop(_storage(tensor), None)

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, *_: Any) -> None:
        if self.strict or self.capturing:
            raise CudaMisuseError("the host waited for the device")

    def let_copies_arrive(self) -> None:
        """Give the host the values of the copies that are under way."""
        # Another thread allocated the targets in inference mode.
        with _disable_current_modes(), torch.inference_mode():
            for target, number in self._under_way:
                target.fill_(number)
        self._under_way.clear()

    def run(self, name: str, blocks: int, threads: int, *arguments: Any) -> None:
        """Implement `smart_embedder.kernels.cuda.CudaKernels`."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if not all(tensor.device.type == "cuda" and tensor.is_contiguous() for tensor in tensors):
            raise CudaMisuseError(f"{name} needs contiguous tensors on the device")
        if blocks < 1 or not 0 < threads <= 1024:
            raise CudaMisuseError(f"{name} cannot have {blocks} blocks of {threads} threads")
        self._launch(name)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = leaves((args, kwargs))
        if not any(isinstance(argument, FakeTensor) or _is_cuda(argument) for argument in given):
            return self._on_the_host(func, args, kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        source = crosses(func, args, kwargs)
        if source is not None:
            return self._copy(func, args, kwargs, source)
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::").removeprefix("prim::")
        on_device = any(_is_on_device(value) for value in (*given, *leaves(result)))
        if on_device and not func.is_view and name not in _FREE:
            if name == "segment_reduce" and not kwargs.get("unsafe"):
                raise CudaMisuseError("lengths are read back from the device (unsafe=False)")
            self._launch(name)
        return result

    def _launch(self, name: str) -> None:
        self.launches[name] += not self.capturing

    def _copy(self, func, args, kwargs, source: Tensor) -> Tensor:
        """Copy between host and device."""
        to_device = source.device.type == "cpu"
        target = args[0] if func is torch.ops.aten.copy_.default else None
        waits = not (kwargs.get("non_blocking") or (target is not None and args[2:] == (True,)))
        if target is None:
            # PyTorch allocates pinned memory for the result of a copy that does not wait.
            where = kwargs["device"] if to_device else "cpu"
            pin = {} if to_device else {"pin_memory": not waits}
            with self:
                dtype = kwargs.get("dtype") or source.dtype
                target = torch.empty(source.shape, dtype=dtype, device=where, **pin)
        if not waits and _storage(source if to_device else target) not in self._pinned:
            raise CudaMisuseError("a copy that nothing waits for needs pinned memory on the host")
        if waits and self.strict:
            raise CudaMisuseError("a copy waited for the device")
        if self.capturing:
            raise CudaMisuseError("a graph would copy the same from the host again and again")
        return target if to_device else self._to_host(source, target, waits=waits)

    def _to_host(self, source: Tensor, target: Tensor, *, waits: bool) -> Tensor:
        if self.current is not self.main:
            if self.current.waited_for < self.launches.total():
                raise CudaMisuseError("a stream reads what another has not written yet")
            self._not_recorded[_storage(source)] = source
        if not waits and (source.dtype is not target.dtype or source.shape != target.shape):
            raise CudaMisuseError("a copy that converts or expands launches a kernel first")
        self.copies += 1
        self._under_way.append((target, self.copies))
        if waits:
            self.let_copies_arrive()
        else:
            with _disable_current_modes():
                target.fill_(torch.nan)
        return target

    def _on_the_host(self, func, args, kwargs) -> Any:
        """Compute on the host, with real numbers."""
        pinned = bool(kwargs.get("pin_memory"))
        with _disable_current_modes():
            result = func(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
        self.pinned_blocks += pinned
        return self.pin_memory(result) if pinned else result


class Event:
    """Lets copies arrive when it is waited for."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self._cuda = cuda
        self._recorded = False

    def record(self, _: Stream) -> None:
        self._recorded = True

    def synchronize(self) -> None:
        if not self._recorded:
            raise CudaMisuseError("an event was waited for that was never recorded")
        self._cuda.let_copies_arrive()


def _of_shapes(actual: Tensor, expected: Tensor) -> float:
    return 0.0 if actual.shape == expected.shape else torch.inf


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a bound method, which a class would not bind again."""

    def method(*arguments: Any) -> Any:
        return function(*arguments)

    return method


def _is_cuda(argument: Any) -> bool:
    return isinstance(argument, torch.device) and argument.type == "cuda"


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def simulated_cuda(
    capability: tuple[int, int] = (9, 0), name: str = "Simulated H100"
) -> Iterator[SimulatedCuda]:
    """Simulate a device of that compute capability as `torch.device("cuda")`, in the block."""
    cuda = SimulatedCuda()
    properties = SimpleNamespace(
        name=name, total_memory=MEMORY, major=capability[0], minor=capability[1]
    )
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: name,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "get_arch_list": lambda: ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
        "mem_get_info": lambda *_: (MEMORY // 2, MEMORY),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 2**30,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "synchronize": cuda.synchronize,
        "current_stream": lambda *_: cuda.current,
        "stream": cuda.stream,
        "Stream": lambda *_, **__: Stream(cuda),
        "CUDAGraph": lambda: Graph(cuda),
        "graph_pool_handle": lambda: (0, 1),
        "Event": lambda **_: Event(cuda),
    }
    with ExitStack() as stack:
        for cached in (transfer.buffers_and_stream, cuda_graphs._capture_stream):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        stack.enter_context(patch.object(choose, "load_kernels", lambda *_: cuda))
        # Proofs compare shapes, because there are no numbers.
        stack.enter_context(patch.object(proof, "_largest_difference", _of_shapes))
        stack.enter_context(patch.object(load, "min_cosine", lambda *_: 1.0))
        # Before the fakes: if it found a GPU, it would let PyTorch allocate tensors there.
        stack.enter_context(fake_tensors("cuda"))
        for key, value in fakes.items():
            stack.enter_context(patch.object(torch.cuda, key, value))
        pin, record = cuda.pin_memory, cuda.record_stream
        stack.enter_context(patch.object(Tensor, "pin_memory", _method(pin)))
        stack.enter_context(patch.object(Tensor, "record_stream", _method(record)))
        stack.enter_context(cuda)
        yield cuda
