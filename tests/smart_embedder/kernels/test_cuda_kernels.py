"""The kernels in CUDA compile for every GPU and compute the same as PyTorch's operators."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
import torch
from torch import nn
from torch.nn import functional

import smart_embedder
from smart_embedder.devices.thread import run_guarded
from smart_embedder.errors import DeviceFailedError, OutOfMemoryError
from smart_embedder.kernels import cuda as cuda_kernels
from smart_embedder.kernels.backend import (
    Backend,
    LayerNorm,
    RmsNorm,
    RotaryEmbedding,
    torch_backend,
)
from smart_embedder.kernels.cuda import fused_backend
from tests.support.emulated_kernels import CAN_EMULATE, EmulatedKernels
from tests.support.nvidia_driver import install_driver

CPU = torch.device("cpu")
# Emulated float16 would be a third compilation of the same source.
DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float32: 2e-6}
emulated = pytest.mark.skipif(not CAN_EMULATE, reason="needs g++ and an x86 processor")


def fused(dtype: torch.dtype) -> Backend:
    return fused_backend(EmulatedKernels(dtype), dtype, torch_backend())


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@emulated
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 8192])
@torch.inference_mode()
def test_row_kernels_of_every_width_and_dtype(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    tensors = [
        torch.randn(shape).to(dtype) for shape in ((3, width), (3, width), (width,), (width,))
    ]

    def results(backend: Backend, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        states, other, weight, bias = (tensor.to(dtype) for tensor in tensors)
        yield backend.add_norm(states.clone(), other, LayerNorm(weight, bias, 1e-5))
        yield backend.rms_norm(states, RmsNorm(weight, 1e-6))
        yield backend.gate(torch.cat([states, other], 1), "silu")

    exact = results(torch_backend(), torch.float32)
    for actual, expected in zip(results(fused(dtype), dtype), exact, strict=True):
        close(actual, expected, dtype)


@emulated
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 4096])
@torch.inference_mode()
def test_float8_rows_have_the_bits_of_pytorch(dtype, width) -> None:
    torch.manual_seed(width)
    rows = torch.randn(6, width) * torch.tensor([1, 1e-3, 300, 1e-6, 0, 1])[:, None]
    # Some numbers are so small beside the largest that float8 has few bits for them, or none.
    rows[0] *= torch.logspace(0, -6, width)
    rows[5, 3] = torch.nan
    rows = rows.to(dtype)
    values, scales = fused(dtype).float8_rows(rows)
    expected, exact = torch_backend().float8_rows(rows)
    torch.testing.assert_close(scales, exact, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values[:5].view(torch.uint8), expected[:5].view(torch.uint8))
    assert values[5].float().isnan().all()
    assert expected[5].float().isnan().all()


@emulated
@torch.inference_mode()
def test_gelu_follows_the_definition() -> None:
    dtype = torch.bfloat16
    layer = nn.Linear(16, 8, dtype=dtype)
    layer.weight.copy_(torch.eye(8, 16))
    layer.bias.zero_()
    # All numbers of 16 bits in the range of a model's states.
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[numbers.abs() <= 1000].unflatten(0, (-1, 2)).repeat(1, 8)
    expected = functional.gelu(numbers[:, :8].double())
    actual = fused(dtype).linear([layer], "gelu")(numbers)
    # As exact as the format, except for numbers that are negligible beside the other states.
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=4e-7)
    # The number of rows does not decide whether the kernel computes them.
    narrow = fused(dtype).linear([nn.Linear(16, 12, dtype=dtype)], "gelu")
    assert torch.equal(narrow(numbers[:2])[:1], narrow(numbers[:1]))
    tanh = fused(dtype).linear([layer], "gelu_new")(numbers)
    torch.testing.assert_close(tanh, functional.gelu(numbers[:, :8], approximate="tanh"))


@emulated
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rotary_of_more_heads_than_warps(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rotated, others = 32 + 8, 8
    states = torch.randn(5, rotated + others, 128).to(dtype)
    weight = torch.randn(rotated, 128).to(dtype)
    embedding = RotaryEmbedding.at(torch.arange(5) * 999, 128, 1e6)
    expected, actual = states.float(), states.clone()
    torch_backend().rotary(expected, RmsNorm(weight.float(), 1e-6), embedding)
    without = replace(torch_backend(), rotary=pytest.fail)
    kernels = fused_backend(EmulatedKernels(dtype), dtype, without)
    kernels.rotary(actual, RmsNorm(weight, 1e-6), embedding)
    close(actual, expected, dtype)


@emulated
@torch.inference_mode()
def test_embed_gives_nan_for_unknown_tokens_and_positions() -> None:
    tables, norm = torch.randn(18, 1024).split([11, 7]), LayerNorm(*torch.randn(2, 1024), 1e-5)
    indices = torch.tensor([10, 11, 3, -1, 0, 0]), torch.tensor([6, 0, 7, 0, -1, 0])
    actual = fused(torch.float32).embed(indices, tables, norm)
    known = tuple(index[[0, -1]] for index in indices)
    close(actual[[0, -1]], torch_backend().embed(known, tables, norm), torch.float32)
    assert actual[1:-1].isnan().all()


@emulated
@pytest.mark.parametrize("wire", [torch.float16, torch.float32])
@torch.inference_mode()
def test_unit_rows_of_zero_and_infinite_length(wire) -> None:
    states, indices = torch.randn(5, 1024), torch.tensor([4, 0, 2])
    states[0], states[4, 7] = 0, torch.inf
    actual, lengths = fused(torch.float32).unit_rows(states, wire, indices)
    expected, exact = torch_backend().unit_rows(states, wire, indices)
    torch.testing.assert_close((actual, lengths), (expected, exact), equal_nan=True)


@emulated
@torch.inference_mode()
def test_float8_rows_with_gelu() -> None:
    states = torch.randn(5, 264, generator=torch.Generator().manual_seed(0)).bfloat16()
    values, scales = fused(torch.bfloat16).float8_rows(states, "gelu")
    expected, exact = torch_backend().float8_rows(states, "gelu")
    torch.testing.assert_close(scales, exact, rtol=1e-5, atol=0)
    steps = values.view(torch.uint8).int() - expected.view(torch.uint8).int()
    assert steps.abs().max() <= 1
    assert (steps != 0).float().mean() < 1e-3


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
        timeout=120,
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
