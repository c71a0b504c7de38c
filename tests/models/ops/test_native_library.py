"""Loading the library, and what its functions refuse."""

import ctypes
import platform
import re

import pytest
import torch
from structlog.testing import capture_logs

from smart_embedder.models.ops import native as library
from smart_embedder.models.ops.build import library_path
from tests.support.native import LIBRARIES


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
    assert logs[0]["build"] == "python -m smart_embedder.models.ops.build"


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


def declared() -> dict[str, list]:
    """The arguments of each kernel in the C files."""
    text = "".join(path.read_text() for path in sorted(library_path().parent.glob("*.c")))
    types = {"int": ctypes.c_int, "long": ctypes.c_long, "float": ctypes.c_float}
    return {
        name: [
            ctypes.c_void_p if "*" in each else types[each.split()[0]]
            for each in arguments.split(",")
        ]
        for name, arguments in re.findall(r"^void KERNEL\((\w+)\)\(([^)]*)\)", text, re.MULTILINE)
    }


@pytest.mark.skipif(not LIBRARIES, reason="the kernels are not built")
@pytest.mark.parametrize("name", sorted(declared()))
def test_a_kernel_is_called_with_the_arguments_that_it_declares(name: str, monkeypatch) -> None:
    called = []
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: _Functions(called))
    found = library.Library("kernels.so", LIBRARIES[0].instructions)
    called.clear()
    found.run(name, 1, 2)
    ((function, arguments),) = called
    assert function.name == f"{name}_{LIBRARIES[0].instructions.name}"
    assert function.argtypes == declared()[name]
    assert function.restype is None
    assert arguments == (1, 2, torch.get_num_threads())


class _Functions:
    """In the place of a library: notes the calls of its functions."""

    def __init__(self, called: list) -> None:
        self._called = called

    def __getattr__(self, name: str):
        def function(*arguments) -> None:
            self._called.append((function, arguments))

        function.name = name
        return function


def test_the_formats_are_those_of_the_c_files() -> None:
    text = (library_path().parent / "vector.h").read_text()
    (names,) = re.findall(r"enum \{([^}]*)\} Format;", text)
    order = [each.split("=")[0].strip().lower() for each in names.split(",") if each.strip()]
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
    assert {types[name]: place for place, name in enumerate(order)} == library.FORMATS
