"""Which attention a name stands for, and where each can run."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from smart_embedder.errors import StartupError
from smart_embedder.models.attention import (
    eager,
    flash_runs,
    load_attention,
    matmul,
    require_runs,
    sdpa,
    varlen,
)
from smart_embedder.models.batch import pack

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))
HALVES = (torch.float16, torch.bfloat16)
FLASH = ("varlen", "flash_attention_2", "flash_attention_3")


@pytest.fixture
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is of this one, 8.0 if the test names none."""
    own = getattr(request, "param", (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: own)


@pytest.mark.parametrize(
    ("capability", "device", "dtype", "fits"),
    [
        *(((7, minor), CUDA, dtype, False) for minor in (5, 9) for dtype in HALVES),
        *((newer, CUDA, dtype, True) for newer in ((8, 0), (8, 6), (9, 0)) for dtype in HALVES),
        *(
            ((8, 0), *other, False)
            for other in ((CUDA, torch.float32), (CPU, torch.bfloat16), (MPS, torch.float16))
        ),
    ],
    indirect=["capability"],
)
@pytest.mark.usefixtures("capability")
def test_flash_attention_is_for_half_precision_on_gpus_from_ampere_on(device, dtype, fits) -> None:
    assert flash_runs(device, dtype) is fits


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        *((name, CUDA, dtype) for name in FLASH for dtype in HALVES),
        *((name, device, torch.float32) for name in ("sdpa", "eager") for device in (CPU, CUDA)),
        ("matmul", MPS, torch.float16),
        ("native", CPU, torch.float32),
        ("native", CPU, torch.bfloat16),
    ],
)
def test_what_can_run_may_be_named(name: str, device: torch.device, dtype: torch.dtype) -> None:
    require_runs(name, device, dtype)


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("name", "device", "dtype", "needed", "is_there"),
    [
        *(
            (name, device, dtype, "an NVIDIA GPU of compute capability 8.0 or newer, and", there)
            for name in FLASH
            for device, dtype, there in (
                (CPU, torch.bfloat16, "bfloat16 on cpu;"),
                (MPS, torch.float16, "float16 on mps;"),
                (CUDA, torch.float32, "float32 on cuda, which has 8.0;"),
            )
        ),
        ("native", CUDA, torch.bfloat16, "a CPU, but", "bfloat16 on cuda, which has 8.0;"),
        ("native", MPS, torch.float32, "a CPU, but", "float32 on mps;"),
    ],
)
def test_what_cannot_run_says_what_it_needs_and_what_there_is(
    name: str, device: torch.device, dtype: torch.dtype, needed: str, is_there: str
) -> None:
    with pytest.raises(StartupError) as caught:
        require_runs(name, device, dtype)
    assert str(caught.value).startswith(f"ATTENTION={name} needs {needed}")
    assert str(caught.value).endswith(f"the model runs in {is_there} set ATTENTION to auto")


@pytest.mark.parametrize(
    ("name", "attention"),
    [("varlen", varlen), ("sdpa", sdpa), ("matmul", matmul), ("eager", eager)],
)
def test_each_name_stands_for_its_attention(name: str, attention: object) -> None:
    assert load_attention(name) is attention


def test_the_kernels_attention_is_not_found_without_them() -> None:
    with pytest.raises(
        StartupError, match=r"are not built, .*: python -m smart_embedder\.models\.ops\.build"
    ):
        load_attention("native")


@pytest.mark.parametrize(
    ("name", "module"),
    [("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface")],
)
def test_flash_attention_is_of_its_package_which_must_be_there(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StartupError, match=f"ATTENTION={name} needs .*not installed.*{module}"):
        load_attention(name)
    calls = []

    def kernel(query: torch.Tensor, *_: object, **options: object) -> torch.Tensor:
        calls.append(options)
        return query

    there = ModuleType(module)
    there.flash_attn_varlen_func = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, there)
    packed = pack([np.zeros(3, np.int64)], device=CPU)
    states = torch.zeros(3, 2, 3, 4)
    load_attention(name)(tuple(states), packed, scale=0.5, causal=True)
    assert calls == [{"softmax_scale": 0.5, "causal": True, "window_size": (-1, -1)}]
