"""The choice of backend and attention, and the messages for those that cannot run."""

import platform
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from smart_embedder.errors import StartupError
from smart_embedder.kernels import target as choose
from smart_embedder.kernels.attention import has_window
from smart_embedder.kernels.build import X86_64
from smart_embedder.kernels.target import choose_backend

LIBRARY = SimpleNamespace(instructions=X86_64.sets[0])
CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


@pytest.fixture(autouse=True)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's compute capability, by default an L4's."""
    found = getattr(request, "param", (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)
    monkeypatch.setattr(choose, "load_kernels", lambda *_: None)


@pytest.mark.parametrize(
    ("capability", "device", "dtype", "kind", "attention"),
    [
        ((8, 0), CUDA, torch.float16, "cuda", "varlen"),
        ((12, 0), CUDA, torch.bfloat16, "cuda", "varlen"),
        ((9, 0), CUDA, torch.float32, "cuda", "sdpa"),
        ((7, 5), CUDA, torch.float16, "cuda", "sdpa"),
        ((8, 9), MPS, torch.float16, "torch", "sdpa"),
    ],
    indirect=["capability"],
)
def test_auto_takes_the_fastest_supported_path(monkeypatch, device, dtype, kind, attention) -> None:
    monkeypatch.setattr(choose, "load_library", pytest.fail)  # The library is for CPUs.
    chosen = choose_backend(device, dtype)
    assert (chosen.fastest("add_linear"), chosen.fastest("attention")) == (kind, attention)


@pytest.mark.parametrize(
    ("capability", "first"),
    [((8, 9), "varlen"), ((9, 0), "flash_attention_3"), ((10, 0), "varlen")],
    indirect=["capability"],
)
def test_hopper_prefers_flash_attention_3_if_it_is_installed(monkeypatch, first) -> None:
    package = ModuleType("flash_attn_interface")
    package.__spec__ = ModuleSpec("flash_attn_interface", None)
    package.flash_attn_varlen_func = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    table = choose_backend(CUDA, torch.float16).table["attention"]
    assert next(iter(table)) == first
    assert "varlen" in table
    assert all(map(has_window, (table[first], table["varlen"])))


@pytest.mark.parametrize("capability", [(9, 0)], indirect=True)
def test_flash_attention_3_for_another_pytorch_is_refused_with_a_warning(monkeypatch) -> None:
    broken = ModuleType("flash_attn_interface")
    broken.__spec__ = ModuleSpec("flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", broken)
    with capture_logs() as logs:
        assert choose_backend(CUDA, torch.float16).fastest("attention") == "varlen"
    (line,) = logs
    assert (line["event"], line["path"]) == ("path_refused", "flash_attention_3")
    assert line["used_instead"] == "varlen"
    with pytest.raises(StartupError, match="built for another PyTorch"):
        choose_backend(CUDA, torch.float16, "flash_attention_3")


BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
AMX = {"amx_tile": True, "amx_bf16": True, "avx512_bf16": True}
AVX, ARM = {"avx512_bf16": True}, {"bf16": True}
# Expected for linear and add_linear, then int8_gemm, add_norm and attention.
ON_CPUS = [
    ("x86_64", AMX, True, BFLOAT16, ("onednn", "onednn", "native", "sdpa")),
    ("x86_64", {"amx_tile": True}, True, BFLOAT16, ("torch", "onednn", "native", "native")),
    ("x86_64", {"amx_bf16": True}, True, BFLOAT16, ("native", "native", "native", "sdpa")),
    ("x86_64", AVX, True, BFLOAT16, ("native", "native", "native", "native")),
    ("x86_64", AMX, False, BFLOAT16, ("onednn", "onednn", "torch", "sdpa")),
    ("x86_64", AVX, False, BFLOAT16, ("onednn", "onednn", "torch", "matmul")),
    ("x86_64", {}, False, BFLOAT16, ("torch", "onednn", "torch", "matmul")),
    ("x86_64", AMX, True, FLOAT32, ("native", "native", "native", "native")),
    ("x86_64", AMX, False, FLOAT32, ("torch", "onednn", "torch", "sdpa")),
    ("aarch64", ARM, False, BFLOAT16, ("torch", "onednn", "torch", "sdpa")),
    ("arm64", ARM, False, BFLOAT16, ("torch", "onednn", "torch", "sdpa")),
]


@pytest.mark.parametrize(("machine", "capabilities", "library", "dtype", "expected"), ON_CPUS)
def test_cpu_paths_depend_on_amx_and_the_kernels(
    monkeypatch, machine, capabilities, library, dtype, expected
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(choose, "load_library", lambda: LIBRARY if library else None)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    chosen = choose_backend(CPU, dtype)
    operations = ("linear", "int8_gemm", "add_norm", "attention")
    assert tuple(map(chosen.fastest, operations)) == expected
    assert chosen.fastest("add_linear") == expected[0]


def test_attention_setting_replaces_only_the_attention(
    monkeypatch,
) -> None:
    monkeypatch.setattr(choose, "load_library", lambda: LIBRARY)
    for name in ("native", "matmul", "sdpa", "eager"):
        chosen = choose_backend(CPU, torch.bfloat16, name)
        assert (chosen.fastest("add_norm"), chosen.fastest("attention")) == ("native", name)
    with pytest.raises(StartupError, match="ATTENTION=varlen needs an NVIDIA GPU"):
        choose_backend(CPU, torch.bfloat16, "varlen")


def test_cuda_backend_turns_reduced_precision_sums_off(monkeypatch) -> None:
    flags = torch.backends.cuda.matmul
    flags.allow_fp16_reduced_precision_reduction = True
    flags.allow_bf16_reduced_precision_reduction = True
    choose_backend(CUDA, torch.float16)
    assert not flags.allow_fp16_reduced_precision_reduction
    assert not flags.allow_bf16_reduced_precision_reduction
