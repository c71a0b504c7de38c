"""The kernels for ARM, compiled here, pass the proof on emulated processors."""

import pytest
import torch

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
from tests.support.emulated_arm import QEMU, build_program, emulated_library

CPU = torch.device("cpu")
ENCODER_SHAPES = Shapes(64, 128, 2, 2, 32, "gelu")
DECODER_SHAPES = Shapes(64, 96, 4, 2, 16, bias=False, causal=True)
KERNELS = {"add_linear", *vars(_NativeOperations)}


@pytest.mark.skipif(QEMU is None, reason="qemu-aarch64 is not installed")
# The set with matrix instructions uses them for bfloat16 and bytes; float32 is the same in both.
@pytest.mark.parametrize(
    ("instructions", "dtype"),
    [
        (AARCH64.sets[0], torch.bfloat16),
        (AARCH64.sets[1], torch.bfloat16),
        (AARCH64.sets[1], torch.float32),
    ],
    ids=lambda case: getattr(case, "name", str(case)),
)
def test_every_arm_kernel_passes_the_proof(instructions, dtype) -> None:
    proofs = []
    with emulated_library(build_program(), instructions) as library:
        backend = with_attention(native_backend(library, dtype), "native")
        target = Target(CPU, dtype, backend)
        for shapes, names in (
            (ENCODER_SHAPES, {*INT8_OPERATIONS, *ENCODER}),
            (DECODER_SHAPES, {*DECODER}),
        ):
            proven = [proof for name in names for proof in prove_paths(target, shapes, name)]
            native = [proof for proof in proven if proof.path == "native"]
            assert {proof.operation for proof in native} == names & KERNELS
            proofs += native
    assert [proof for proof in proofs if not proof.holds] == []
