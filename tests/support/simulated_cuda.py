"""A CUDA device without a GPU, which checks launches, copies and synchronisations.

Its tensors are PyTorch's fake tensors, with shape, dtype and device but no numbers. Mixing devices
and reading a number raise by themselves. Errors that a real device shows only sometimes, or only by
its slowness, raise `CudaMisuseError` at once: a copy from or to memory that is not pinned, a
synchronisation within a forward, a stream that reads what another has not written yet. Results on
the host are NaN until their event is waited for, and then `ARRIVED`. The device is cuda:0, always
with its number.
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from smart_embedder.hardware import transfer
from smart_embedder.kernels import proof
from smart_embedder.kernels import target as choose
from smart_embedder.models import cuda_graphs
from smart_embedder.models.families import registry as load
from tests.support.fake_device import crosses, fake_tensors, is_composite, leaves
from tests.support.simulated_streams import (
    ARRIVED,
    Arrival,
    CudaMisuseError,
    Event,
    Graph,
    Stream,
)

MEMORY = 80 * 2**30
# Operators that launch nothing: they allocate memory, or reinterpret it. Views are known anyway.
_FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "lift_fresh", "alias", "_unsafe_view", "device"),
}


class SimulatedCuda(TorchDispatchMode):
    """Counts launches on the device; within `forward` the host must not wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.pinned_blocks = 0
        self.bytes_to_host = 0
        self.main = self.current = Stream()
        self.strict = False
        self._written: dict[int, tuple[Stream, int]] = {}
        self._pinned: dict[int, Tensor] = {}
        self._not_recorded: dict[int, tuple[Stream, int]] = {}
        self._under_way: list[Arrival] = []
        # Keeps storages alive, so that no address is used twice.
        self._storages: dict[int, StorageWeakRef] = {}
        self.capturing: Graph | None = None

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
        if not all(self.main.has_seen(*reader) for reader in self._not_recorded.values()):
            raise CudaMisuseError("memory may be reused while another stream still reads it")

    # Replacements of functions in torch.cuda and of methods of tensors.

    def pin_memory(self, tensor: Tensor, *_: Any) -> Tensor:
        self._pinned[_storage(tensor)] = tensor
        return tensor

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        if self._not_recorded.get(_storage(tensor), (None, 0))[0] is stream:
            del self._not_recorded[_storage(tensor)]

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

    def run(self, name: str, blocks: int, threads: int, *arguments: Any) -> None:
        """Implement `smart_embedder.kernels.cuda.CudaKernels`."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if not all(tensor.device.type == "cuda" and tensor.is_contiguous() for tensor in tensors):
            raise CudaMisuseError(f"{name} needs contiguous tensors on the device")
        if blocks < 1 or not 0 < threads <= 1024:
            raise CudaMisuseError(f"{name} cannot have {blocks} blocks of {threads} threads")
        self._note(name, tensors, tensors)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = leaves((args, kwargs))
        if not any(isinstance(argument, FakeTensor) or _is_cuda(argument) for argument in given):
            return self._on_the_host(func, args, kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [argument for argument in given if isinstance(argument, Tensor)]
        source = crosses(func, args, kwargs)
        if source is not None:
            return self._copy(func, args, kwargs, source)
        result = func(*args, **kwargs)
        self._launch(func, kwargs, tensors, result)
        return result

    def _launch(self, func, kwargs, tensors, result) -> None:
        results = [value for value in leaves(result) if isinstance(value, Tensor)]
        if not any(tensor.device.type == "cuda" for tensor in (*tensors, *results)):
            return
        name = func._schema.name.removeprefix("aten::").removeprefix("prim::")
        if func.is_view or name in _FREE:
            return
        if name == "segment_reduce" and not kwargs.get("unsafe"):
            raise CudaMisuseError("lengths are read back from the device (unsafe=False)")
        self._note(name, tensors, results)

    def _note(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        if self.capturing is not None:
            self.capturing.captured.append((read, written))
            return
        for tensor in read:
            self._read(tensor)
        self.launches[name] += 1
        self.current.time += 1
        for tensor in written:
            if tensor.device.type == "cuda":
                self._write(tensor)

    def _write(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        self._storages[key] = StorageWeakRef(tensor.untyped_storage())
        self._written[key] = self.current, self.current.time

    def _read(self, tensor: Tensor) -> None:
        """Check that the streams order this read after the write."""
        if tensor.device.type == "cuda" and (writer := self._written.get(_storage(tensor))):
            if not self.current.has_seen(*writer):
                raise CudaMisuseError("a stream reads what another has not written yet")
            if writer[0] is not self.current:
                self._not_recorded[_storage(tensor)] = self.current, self.current.time + 1

    def _copy(self, func, args, kwargs, source: Tensor) -> Tensor:
        """Copy between host and device."""
        to_device = source.device.type == "cpu"
        target = args[0] if func is torch.ops.aten.copy_.default else None
        waits = not (kwargs.get("non_blocking") or (target is not None and args[2:] == (True,)))
        if not to_device and target is None:
            # PyTorch allocates pinned memory for the result of a copy that does not wait.
            dtype = kwargs.get("dtype") or source.dtype
            with self:
                target = torch.empty(source.shape, dtype=dtype, pin_memory=not waits)
        pinned = _storage(source if to_device else target) in self._pinned
        if not waits and not pinned:
            raise CudaMisuseError("a copy that nothing waits for needs pinned memory on the host")
        if waits and self.strict:
            raise CudaMisuseError("a copy waited for the device")
        if self.capturing is not None:
            raise CudaMisuseError("a graph would copy the same from the host again and again")
        if to_device:
            return self._to_device(source, target, kwargs)
        self._read(source)
        return self._to_host(source, target, waits=waits)

    def _to_device(self, source: Tensor, target: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
        if target is None:
            dtype = kwargs.get("dtype") or source.dtype
            target = torch.empty(source.shape, dtype=dtype, device=kwargs["device"])
        self._write(target)
        return target

    def _to_host(self, source: Tensor, target: Tensor, *, waits: bool) -> Tensor:
        with _disable_current_modes():
            target.fill_(ARRIVED if waits else torch.nan)
        if waits:
            return target
        if source.dtype is not target.dtype or source.shape != target.shape:
            raise CudaMisuseError("a copy that converts or expands launches a kernel first")
        self._under_way = [copy for copy in self._under_way if not copy.done]
        if any(copy.overlaps(target) for copy in self._under_way):
            raise CudaMisuseError(
                "pinned memory is written to that an earlier copy still writes to"
            )
        self.bytes_to_host += target.nbytes
        arrival = Arrival(target)
        self.current.copies.append(arrival)
        self._under_way.append(arrival)
        return target

    def _on_the_host(self, func, args, kwargs) -> Any:
        """Compute on the host, with real numbers."""
        pinned = bool(kwargs.get("pin_memory"))
        with _disable_current_modes():
            result = func(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
        self.pinned_blocks += pinned
        return self.pin_memory(result) if pinned else result


def _of_shapes(actual: Tensor, expected: Tensor) -> float:
    return 0.0 if actual.shape == expected.shape else torch.inf


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a bound method, which a class would not bind again."""

    def method(*arguments: Any) -> Any:
        return function(*arguments)

    return method


def _is_cuda(argument: Any) -> bool:
    return isinstance(argument, torch.device) and argument.type == "cuda"


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
        "Stream": Stream,
        "CUDAGraph": lambda: Graph(cuda),
        "graph_pool_handle": lambda: (0, 1),
        "Event": Event,
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
