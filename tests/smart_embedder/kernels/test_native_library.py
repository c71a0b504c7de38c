"""Loading the library, and the arguments of its functions."""

import ctypes
import platform
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from structlog.testing import capture_logs

from smart_embedder.kernels import native as library
from smart_embedder.kernels.build import library_path
from tests.support.native import LIBRARIES, needs_kernels

X86 = dict.fromkeys(("avx2", "avx512_bf16", "avx512_vnni"), True)


@pytest.mark.parametrize(
    ("machine", "capabilities", "content", "event", "fields"),
    [
        (
            *("x86_64", X86, None, "kernels_not_built"),
            {"build": "python -m smart_embedder.kernels.build"},
        ),
        ("x86_64", X86, b"not a library", "kernels_not_loaded", {"reason": "kernels.so"}),
        # Nothing is logged on machines that no kernels exist for.
        ("riscv64", {}, None, None, {}),
    ],
)
def test_missing_or_broken_library_is_logged(
    monkeypatch, tmp_path, machine, capabilities, content, event, fields
) -> None:
    path = tmp_path / "kernels.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(library, "library_path", lambda: path)
    with capture_logs() as logs:
        assert library.load_library.__wrapped__() is None
    assert [line["event"] for line in logs] == ([event] if event else [])
    assert all(value in logs[0][name] for name, value in fields.items())


def declared() -> dict[str, list]:
    """Read the arguments of each kernel in the C files."""
    text = "".join(path.read_text() for path in sorted(library_path().parent.glob("*.c")))
    types = {"int": ctypes.c_int, "long": ctypes.c_long, "float": ctypes.c_float}
    return {
        name: [
            ctypes.c_void_p if "*" in argument else types[argument.split()[0]]
            for argument in arguments.split(",")
        ]
        for name, arguments in re.findall(r"^void KERNEL\((\w+)\)\(([^)]*)\)", text, re.MULTILINE)
    }


@needs_kernels
@pytest.mark.parametrize("name", sorted(declared()))
def test_kernel_arguments_match_the_c_declarations(name: str, monkeypatch) -> None:
    functions = Mock()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: functions)
    found = library.Library("kernels.so", LIBRARIES[0].instructions)
    found.run(name, 1, 2)
    function = getattr(functions, f"{name}_{LIBRARIES[0].instructions.name}")
    assert function.argtypes == declared()[name]
    assert function.restype is None
    function.assert_called_once_with(1, 2, torch.get_num_threads())


def test_formats_match_the_c_header() -> None:
    text = (library_path().parent / "vector.h").read_text()
    (names,) = re.findall(r"enum \{([^}]*)\} Format;", text)
    order = [name.split("=")[0].strip().lower() for name in names.split(",") if name.strip()]
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
    assert {types[name]: number for number, name in enumerate(order)} == library.FORMATS


# AT_HWCAP and AT_HWCAP2 of Cortex-A72, Neoverse N1 and Neoverse V1.
HWCAPS = {"a72": (0x8FB, 0), "n1": (0x119FFB, 0), "v1": (0xECFFFFFB, 0x7F87_7FFF)}


@pytest.mark.parametrize(
    ("processor", "machine", "names"),
    [
        ("v1", "aarch64", ["neon_matrix", "neon_dot"]),
        ("n1", "aarch64", ["neon_dot"]),
        ("a72", "aarch64", []),
        ("v1", "arm64", []),
    ],
)
def test_arm_instruction_sets_follow_from_hwcap(monkeypatch, processor, machine, names) -> None:
    def getauxval(kind: int) -> int:
        return HWCAPS[processor][kind == 26]

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(getauxval=getauxval))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True, "dot": True})
    assert [instructions.name for instructions in library.runnable_instruction_sets()] == names
