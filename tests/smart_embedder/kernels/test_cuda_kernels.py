"""The kernels in CUDA compile for every GPU and get their arguments; `test_backend` runs them."""

import ctypes
from contextlib import nullcontext
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
import torch

from smart_embedder.devices.thread import run_guarded
from smart_embedder.errors import DeviceFailedError, OutOfMemoryError
from smart_embedder.kernels import cuda as cuda_kernels
from tests.support.forked import run_forked
from tests.support.nvidia_driver import install_driver


# The source has one form below 8.0, one below 8.9, and one from 8.9 on.
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 5), torch.float16), ((8, 6), torch.bfloat16), ((12, 0), torch.float32)],
)
def test_cuda_kernels_compile_for_every_gpu(
    capability: tuple[int, int], dtype: torch.dtype
) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings and nvidia-cuda-nvrtc are missing")
    assert cuda_kernels.compile_cuda(capability, dtype).startswith(b"\x7fELF")


def launch_by(library: Path) -> list[object]:
    """Launch a kernel by a driver that is the fake; return the arguments that it received."""
    seen = ctypes.CDLL(str(library))
    ctypes.c_int.in_dll(seen, "arguments").value = 5
    torch.cuda.device = lambda _: nullcontext()
    torch.cuda.current_device = lambda: 1
    torch.cuda.current_stream = lambda _: SimpleNamespace(synchronize=int)
    torch._C._cuda_getCurrentRawStream = lambda index: 7 + index
    torch.cuda.get_device_capability = lambda _: (9, 0)
    states, torch.empty = torch.zeros(3), lambda *_, **__: None
    # NVRTC would call functions that this driver lacks.
    cuda_kernels.compile_cuda = lambda *_: b"\x7fELF, and so on"
    kernels = cuda_kernels.CudaKernels(torch.device("cuda:0"), torch.float16)
    arguments = states, None, 0.5, cuda_kernels.LongLong(2**40), -9
    kernels.run("gate", 5, 64, *arguments)
    received = [bytes(argument) for argument in (ctypes.c_ubyte * 8 * 16).in_dll(seen, "argument")]
    kinds = ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_float, ctypes.c_longlong, ctypes.c_int
    found = [kind.from_buffer_copy(bits).value for kind, bits in zip(kinds, received, strict=False)]
    found[0] = found[0] == states.data_ptr()
    found += [ctypes.c_uint.in_dll(seen, name).value for name in ("blocks", "threads")]
    found += [ctypes.c_void_p.in_dll(seen, name).value for name in ("function", "stream")]
    found.append(bytes((ctypes.c_ubyte * 4).in_dll(seen, "image")).decode())
    # From a thread with another current device.
    torch.cuda.current_device, torch.cuda.device = (
        lambda: 0,
        lambda index: nullcontext(found.append(index)),
    )
    kernels.run("gate", 5, 64, *arguments)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's own driver is loaded")
def test_cuda_driver_gets_the_declared_arguments(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is missing")
    install_driver(tmp_path, 13000)
    found = run_forked(lambda: launch_by(tmp_path / "libcuda.so.1"))
    gate = 1 + cuda_kernels.NAMES.index("gate")
    assert found == [True, 0, 0.5, 2**40, -9, 5, 64, gate, 8, "\x7fELF", 1]


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


def synchronize_on_a_failed_device(_: torch.device) -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("status", "synchronize", "error"),
    [
        (Status.CUDA_ERROR_OUT_OF_MEMORY, lambda _: None, OutOfMemoryError),
        (Status.CUDA_ERROR_ILLEGAL_ADDRESS, synchronize_on_a_failed_device, DeviceFailedError),
    ],
    ids=["tried with less memory", "takes the device out"],
)
def test_failed_cuda_launch_raises_the_devices_error(
    monkeypatch, status, synchronize, error
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    kernels = object.__new__(cuda_kernels.CudaKernels)
    kernels._device, kernels._index = torch.device("cuda:0"), 0
    kernels._functions, kernels._types = {"gate": None}, {}
    kernels._driver = SimpleNamespace(cuLaunchKernel=lambda *_: (status,))
    with pytest.raises(error):
        run_guarded(lambda: kernels.run("gate", 1, 32), lambda: None)


def test_failed_cuda_compilation_logs_a_warning(monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA returned NVRTC_ERROR_COMPILATION")

    monkeypatch.setattr(cuda_kernels, "CudaKernels", fail)
    cuda_kernels.load_kernels.cache_clear()
    with structlog.testing.capture_logs() as lines:
        assert cuda_kernels.load_kernels(torch.device("cuda:0"), torch.float16) is None
    cuda_kernels.load_kernels.cache_clear()
    assert [line["event"] for line in lines] == ["cuda_kernels_not_compiled"]
