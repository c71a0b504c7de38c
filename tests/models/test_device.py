"""What DTYPE means on each device."""

import pytest
import torch

from app.errors import StartupError
from app.models import device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def with_capabilities(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(names, True))


@pytest.mark.parametrize(
    ("capability", "expected"), [("amx_bf16", torch.bfloat16), ("avx2", torch.float32)]
)
def test_auto_is_bfloat16_where_the_processor_has_it(monkeypatch, capability, expected) -> None:
    with_capabilities(monkeypatch, capability)
    assert device.choose_dtype("auto", CPU) == expected


@pytest.mark.parametrize(
    ("capabilities", "rest"),
    [(("amx_int8", "amx_bf16"), torch.bfloat16), (("avx512_vnni",), torch.float32)],
)
def test_beside_int8_the_rest_runs_in_what_is_native(monkeypatch, capabilities, rest) -> None:
    with_capabilities(monkeypatch, *capabilities)
    assert device.choose_dtype("int8", CPU) == rest


def test_int8_on_a_gpu_stops_the_start() -> None:
    with pytest.raises(StartupError, match="DTYPE=int8 is for CPUs, and the models run on cuda"):
        device.choose_dtype("int8", CUDA)


def test_int8_on_a_processor_that_would_saturate_stops_the_start(monkeypatch) -> None:
    with_capabilities(monkeypatch, "avx2", "avx512_f")
    with pytest.raises(StartupError, match="DTYPE=int8 needs an x86 processor with VNNI or AMX"):
        device.choose_dtype("int8", CPU)
