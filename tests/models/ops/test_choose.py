"""Which backend and which attention are taken, and what is said where one cannot run."""

import platform
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import get_args

import pytest
import torch
from structlog.testing import capture_logs

from smart_embedder.errors import StartupError
from smart_embedder.models.attention import FLASH_MODULES, takes_window
from smart_embedder.models.ops import choose
from smart_embedder.models.ops.build import X86_64
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.settings import Settings

LIBRARY = SimpleNamespace(instructions=X86_64.sets[0])
CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


@pytest.fixture
def no_library(monkeypatch) -> None:
    monkeypatch.setattr(choose, "load_library", lambda: None)


@pytest.fixture(autouse=True)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compute capability of the GPU, that of an L4 where a test names none."""
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
def test_auto_takes_the_fastest_that_runs(monkeypatch, device, dtype, kind, attention) -> None:
    monkeypatch.setattr(choose, "load_library", pytest.fail)  # It is for CPUs.
    chosen = choose_backend(device, dtype)
    assert (chosen.fastest("add_linear"), chosen.fastest("attention")) == (kind, attention)


@pytest.mark.parametrize(
    ("capability", "first"),
    [((8, 9), "varlen"), ((9, 0), "flash_attention_3"), ((10, 0), "varlen")],
    indirect=["capability"],
)
def test_on_hopper_its_own_attention_is_tried_first_where_it_is_installed(
    monkeypatch, first
) -> None:
    there = ModuleType("flash_attn_interface")
    there.__spec__ = ModuleSpec("flash_attn_interface", None)
    there.flash_attn_varlen_func = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "flash_attn_interface", there)
    table = choose_backend(CUDA, torch.float16).table["attention"]
    assert next(iter(table)) == first
    assert "varlen" in table
    assert all(map(takes_window, (table[first], table["varlen"])))


@pytest.mark.parametrize("capability", [(9, 0)], indirect=True)
def test_one_that_was_built_for_another_pytorch_is_left_out_with_one_warning(monkeypatch) -> None:
    broken = ModuleType("flash_attn_interface")
    broken.__spec__ = ModuleSpec("flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", broken)
    with capture_logs() as logs:
        assert choose_backend(CUDA, torch.float16).fastest("attention") == "varlen"
    (line,) = logs
    assert (line["event"], line["path"]) == ("path_refused", "flash_attention_3")
    assert line["used_instead"] == "varlen"
    with pytest.raises(StartupError, match="not for this PyTorch"):
        choose_backend(CUDA, torch.float16, "flash_attention_3")


@pytest.mark.parametrize(
    ("amx", "library", "kind", "attention"),
    [
        (True, True, "native", "sdpa"),
        (False, True, "native", "native"),
        (True, False, "onednn", "sdpa"),
        (False, False, "onednn", "matmul"),
    ],
)
def test_in_bfloat16_on_a_cpu_it_depends_on_amx_and_the_kernels(
    monkeypatch, amx, library, kind, attention
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx})
    monkeypatch.setattr(choose, "load_library", lambda: LIBRARY if library else None)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    chosen = choose_backend(CPU, torch.bfloat16)
    assert (chosen.fastest("int8_gemm"), chosen.fastest("attention")) == (kind, attention)


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_on_arm_without_the_kernels_attention_is_pytorch_s_own(monkeypatch, machine) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert choose_backend(CPU, torch.bfloat16).fastest("attention") == "sdpa"


@pytest.mark.parametrize(
    ("library", "kind", "attention"),
    [(True, "native", "native"), (False, "onednn", "sdpa")],
)
def test_in_float32_on_a_cpu_it_depends_on_the_kernels(
    monkeypatch, library, kind, attention
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "amx_tile": True})
    monkeypatch.setattr(choose, "load_library", lambda: LIBRARY if library else None)
    chosen = choose_backend(CPU, torch.float32)
    assert (chosen.fastest("int8_gemm"), chosen.fastest("attention")) == (kind, attention)


@pytest.mark.parametrize(
    ("capabilities", "dtype", "linear", "int8"),
    [
        ({"amx_tile": True, "avx512_bf16": True}, torch.bfloat16, "onednn", "onednn"),
        ({"avx512_bf16": True}, torch.bfloat16, "native", "native"),
        ({"amx_tile": True, "avx512_bf16": True}, torch.float32, "native", "native"),
        ({"amx_tile": True}, torch.bfloat16, "torch", "onednn"),
    ],
)
def test_products_have_the_name_of_what_multiplies(
    monkeypatch, capabilities, dtype, linear, int8
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(choose, "load_library", lambda: LIBRARY)
    chosen = choose_backend(CPU, dtype)
    names = [chosen.fastest(each) for each in ("linear", "add_linear", "int8_gemm", "add_norm")]
    assert names == [linear, linear, int8, "native"]


def test_the_setting_overrides_the_attention_alone(monkeypatch) -> None:
    monkeypatch.setattr(choose, "load_library", lambda: LIBRARY)
    for name in ("native", "matmul", "sdpa", "eager"):
        chosen = choose_backend(CPU, torch.bfloat16, name)
        assert (chosen.fastest("add_norm"), chosen.fastest("attention")) == ("native", name)


@pytest.mark.parametrize("capability", [(7, 5)], indirect=True)
@pytest.mark.parametrize("name", ["varlen", "flash_attention_2"])
def test_an_attention_for_newer_gpus_stops_the_start_on_an_older_one(name: str) -> None:
    with pytest.raises(StartupError, match=r"8\.0 or newer.* on cuda, which has 7\.5; set ATTE"):
        choose_backend(CUDA, torch.float16, name)


def test_on_nvidia_gpus_sums_of_products_are_not_rounded_on_the_way(monkeypatch) -> None:
    flags = torch.backends.cuda.matmul
    flags.allow_fp16_reduced_precision_reduction = True
    flags.allow_bf16_reduced_precision_reduction = True
    choose_backend(CUDA, torch.float16)
    assert not flags.allow_fp16_reduced_precision_reduction
    assert not flags.allow_bf16_reduced_precision_reduction


def test_every_name_that_health_can_show_may_be_set() -> None:
    names = set(get_args(Settings.model_fields["attention"].annotation))
    shown = {"varlen", *FLASH_MODULES, "native", "matmul", "sdpa", "eager"}
    assert names == shown | {"auto"}
