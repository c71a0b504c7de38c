"""The kernels for ARM, compiled here and run on emulated processors, and which are chosen."""

import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from smart_embedder.models.ops.backend import (
    Backend,
)
from smart_embedder.models.ops.build import AARCH64
from smart_embedder.models.ops.choose import with_attention
from smart_embedder.models.ops.native import _Kernels, native_backend, runnable_here
from smart_embedder.models.ops.proof import DECODER, ENCODER, INT8_OPERATIONS, Shapes, Target
from tests.support.emulated_arm import QEMU, EmulatedLibrary, built_program

CPU = torch.device("cpu")
ENCODER_SHAPES = Shapes(128, 256, 4, 4, 32, "gelu")
DECODER_SHAPES = Shapes(128, 192, 4, 2, 64, bias=False, causal=True)
KERNELS = {"add_linear", *vars(_Kernels)}
# Bits of the auxiliary vector as processors have them: Cortex-A72, Neoverse N1 and V1.
HWCAPS = {"a72": (0x8FB, 0), "n1": (0x119FFB, 0), "v1": (0xECFFFFFB, 0x7F87_7FFF)}


@pytest.fixture(scope="module")
def program() -> Path:
    if QEMU is None:
        pytest.skip("qemu-aarch64 is not installed")
    return built_program()


@pytest.fixture(scope="module", params=AARCH64.sets, ids=lambda each: each.name)
def library(request, program: Path) -> Iterator[EmulatedLibrary]:
    emulated = EmulatedLibrary(program, request.param)
    yield emulated
    emulated.close()


@pytest.fixture
def backend(library, dtype) -> Backend:
    return with_attention(native_backend(library, dtype), "native")


@pytest.mark.parametrize(
    ("shapes", "operations"),
    [
        (ENCODER_SHAPES, ENCODER),
        (ENCODER_SHAPES, (*INT8_OPERATIONS, *ENCODER)),
        (DECODER_SHAPES, DECODER),
    ],
    ids=["encoder", "int8", "decoder"],
)
def test_every_kernel_passes_the_start_up_proof(backend, dtype, shapes, operations) -> None:
    target = Target(CPU, dtype, backend)
    proofs = [proof for each in operations for proof in target.proofs(shapes, each)]
    native = {proof.operation: proof for proof in proofs if proof.path == "native"}
    assert native.keys() == {each for each in operations if each in KERNELS}
    assert [proof for proof in native.values() if not proof.holds] == []


@pytest.mark.parametrize(
    ("processor", "machine", "names"),
    [
        ("v1", "aarch64", ["neon_matrix", "neon_dot"]),
        ("n1", "aarch64", ["neon_dot"]),
        ("a72", "aarch64", []),
        ("v1", "arm64", []),
    ],
)
def test_what_linux_says_of_the_processor_decides(monkeypatch, processor, machine, names) -> None:
    def getauxval(kind: int) -> int:
        return HWCAPS[processor][kind == 26]

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(getauxval=getauxval))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True, "dot": True})
    assert [each.name for each in runnable_here()] == names
