"""The kernels in CUDA compile for every GPU and get their arguments; `test_backend` runs them."""

import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
import torch

import smart_embedder
from smart_embedder.devices.thread import run_guarded
from smart_embedder.errors import DeviceFailedError, OutOfMemoryError
from smart_embedder.kernels import cuda as cuda_kernels
from tests.support.nvidia_driver import install_driver
from tests.support.waiting import LIMIT


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


LAUNCH = """
import ctypes, sys
from contextlib import nullcontext
from types import SimpleNamespace
import torch
from smart_embedder.kernels import cuda
from smart_embedder.kernels.cuda import NAMES, CudaKernels, LongLong

seen = ctypes.CDLL(sys.argv[1])
ctypes.c_int.in_dll(seen, "arguments").value = 5
torch.cuda.device = lambda _: nullcontext()
torch.cuda.current_device = lambda: 1
torch.cuda.current_stream = lambda _: SimpleNamespace(synchronize=int)
torch._C._cuda_getCurrentRawStream = lambda index: 7 + index
torch.cuda.get_device_capability = lambda _: (9, 0)
torch.empty = lambda *_, **__: None
# NVRTC would call functions that this driver lacks.
cuda.compile_cuda = lambda *_: bytes(b"\\x7fELF, and so on")
kernels = CudaKernels(torch.device("cuda:0"), torch.float16)
assert bytes((ctypes.c_ubyte * 4).in_dll(seen, "image")) == b"\\x7fELF"
states = torch.zeros(3)
kernels.run("gate", 5, 64, states, None, 0.5, LongLong(2**40), -9)
received = [bytes(argument) for argument in (ctypes.c_ubyte * 8 * 16).in_dll(seen, "argument")]
found = [ctypes.c_ulonglong.from_buffer_copy(received[0]).value == states.data_ptr()]
kinds = ctypes.c_ulonglong, ctypes.c_float, ctypes.c_longlong, ctypes.c_int
found += [kind.from_buffer_copy(argument).value for kind, argument in zip(kinds, received[1:])]
found += [ctypes.c_uint.in_dll(seen, name).value for name in ("blocks", "threads")]
assert ctypes.c_void_p.in_dll(seen, "function").value == 1 + NAMES.index("gate")
print(found, ctypes.c_void_p.in_dll(seen, "stream").value)
# From a thread with another current device.
torch.cuda.current_device, torch.cuda.device = lambda: 0, lambda index: nullcontext(print(index))
kernels.run("gate", 5, 64, states, None, 0.5, LongLong(2**40), -9)
"""


def test_cuda_driver_gets_the_declared_arguments(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is missing")
    found = install_driver(tmp_path, 13000)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(tmp_path / "libcuda.so.1")],
        env={"PYTHONPATH": str(Path(smart_embedder.__file__).parents[1]), **found},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.stdout == f"[True, 0, 0.5, {2**40}, -9, 5, 64] 8\n1\n", done.stderr


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
