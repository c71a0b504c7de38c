"""The kernels for ARM, compiled here, pass the proof on emulated processors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from smart_embedder.kernels.backend import Backend
from smart_embedder.kernels.build import AARCH64
from smart_embedder.kernels.native import _NativeOperations, native_backend
from smart_embedder.kernels.proof import prove_paths
from smart_embedder.kernels.target import (
    DECODER,
    ENCODER,
    INT8_OPERATIONS,
    Shapes,
    Target,
    with_attention,
)
from tests.support.emulated_arm import (
    QEMU,
    EmulatedLibrary,
    build_program,
    emulated_library,
)

CPU = torch.device("cpu")
ENCODER_SHAPES = Shapes(128, 256, 4, 4, 32, "gelu")
DECODER_SHAPES = Shapes(128, 192, 4, 2, 64, bias=False, causal=True)
KERNELS = {"add_linear", *vars(_NativeOperations)}


@pytest.fixture(scope="module")
def program() -> Path:
    if QEMU is None:
        pytest.skip("qemu-aarch64 is not installed")
    return build_program()


@pytest.fixture(scope="module", params=AARCH64.sets, ids=lambda instructions: instructions.name)
def library(request, program: Path) -> Iterator[EmulatedLibrary]:
    with emulated_library(program, request.param) as library:
        yield library


@pytest.fixture
def backend(library, dtype) -> Backend:
    return with_attention(native_backend(library, dtype), "native")


@pytest.mark.parametrize(
    ("shapes", "operations"),
    [(ENCODER_SHAPES, (*INT8_OPERATIONS, *ENCODER)), (DECODER_SHAPES, DECODER)],
    ids=["encoder and int8", "decoder"],
)
def test_every_arm_kernel_passes_the_proof(backend, dtype, shapes, operations) -> None:
    target = Target(CPU, dtype, backend)
    proofs = [proof for name in operations for proof in prove_paths(target, shapes, name)]
    native = {proof.operation: proof for proof in proofs if proof.path == "native"}
    assert native.keys() == {name for name in operations if name in KERNELS}
    assert [proof for proof in native.values() if not proof.holds] == []
