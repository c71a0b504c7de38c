"""Loading the library, and what its functions refuse."""

import platform

import pytest
import torch
from structlog.testing import capture_logs

from app.models.ops import native_library as library


@pytest.fixture
def processor(monkeypatch):
    """One that can run the kernels, whatever this one is."""
    names = ("avx2", "avx512_bf16", "avx512_vnni")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(names, True))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def load(monkeypatch, path) -> tuple[object, list]:
    monkeypatch.setattr(library, "library_path", lambda: path)
    with capture_logs() as logs:
        return library.load_library.__wrapped__(), logs


def test_without_the_library_the_log_says_how_to_build_it(monkeypatch, processor, tmp_path) -> None:
    loaded, logs = load(monkeypatch, tmp_path / "missing.so")
    assert loaded is None
    assert logs[0]["event"] == "kernels_not_built"
    assert logs[0]["build"] == "python -m app.models.ops.build"


def test_a_broken_library_costs_speed_alone(monkeypatch, processor, tmp_path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    loaded, logs = load(monkeypatch, broken)
    assert loaded is None
    assert logs[0]["event"] == "kernels_not_loaded"
    assert "broken.so" in logs[0]["reason"]


def test_another_processor_is_not_told_to_build_anything(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert load(monkeypatch, tmp_path / "missing.so") == (None, [])


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 4).t()[:, :2], torch.zeros(4, dtype=torch.float64)],
    ids=["gaps", "another dtype"],
)
def test_numbers_that_lie_otherwise_than_a_kernel_reads_them_are_refused(tensor) -> None:
    with pytest.raises(ValueError, match=r"a kernel needs torch\.float32 numbers without gaps"):
        library.address(tensor, torch.float32)
