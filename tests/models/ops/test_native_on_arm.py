"""The kernels for ARM, compiled here and run on emulated processors, and which are chosen."""

import ctypes
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from smart_embedder.engine.records import Outputs
from smart_embedder.models.ops.backend import (
    Backend,
    QuantizedRows,
    QuantizedWeights,
    torch_backend,
)
from smart_embedder.models.ops.build import AARCH64
from smart_embedder.models.ops.choose import with_attention
from smart_embedder.models.ops.native import _Kernels, native_backend, runnable_here
from smart_embedder.models.ops.proof import DECODER, ENCODER, INT8_OPERATIONS, Shapes, Target
from smart_embedder.models.tasks.dense import DenseEmbedder
from smart_embedder.models.tasks.embedders import M3Embedder
from tests.models.ops.test_native import CLOSE, random_layer
from tests.models.ops.test_native_attention import CLOSE as ATTENTION_CLOSE
from tests.models.ops.test_native_attention import attend, exactly
from tests.support.emulated_arm import QEMU, EmulatedLibrary, built_program
from tests.support.packed_attention import pack_lengths, random_states
from tests.support.texts import varied_texts

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


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 49])
@pytest.mark.parametrize("depth", [16, 48, 1040])
@torch.inference_mode()
def test_products_are_exact_to_their_last_digits(backend, dtype, rows, depth) -> None:
    layer = random_layer(128, depth, dtype)
    states = torch.randn(rows, depth).to(dtype)
    exact = functional.linear(states.double(), layer.weight.double(), layer.bias.double())
    actual = backend.linear([layer], "gelu")(states).double()
    torch.testing.assert_close(actual, functional.gelu(exact), **CLOSE[dtype])


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it(backend, dtype) -> None:
    linear = backend.linear([random_layer(64, 1040, dtype)])
    states = torch.randn(11, 1040).to(dtype)
    together = linear(states)
    assert torch.equal(torch.cat([linear(row[None]) for row in states]), together)


@pytest.mark.parametrize("rows", [1, 5, 7])
@pytest.mark.parametrize("depth", [16, 48, 2064])
def test_bytes_are_summed_up_exactly(library, rows, depth) -> None:
    torch.manual_seed(depth)
    weight = torch.randint(-127, 128, (128, depth), dtype=torch.int8)
    values = torch.randint(0, 256, (rows, depth), dtype=torch.uint8)
    weight[0], weight[1], values[0] = 127, -127, 255
    weights = QuantizedWeights(weight, torch.ones(128), *torch.zeros(2, 128))
    states = QuantizedRows(values, torch.ones(rows, 1), torch.zeros(rows, 1))
    actual = native_backend(library, torch.float32).int8_gemm(weights, torch.float32)(states)
    assert torch.equal(actual, (values.double() @ weight.double().t()).float())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "heads", "width", "group", "window"),
    [
        ([1, 3, 6, 7, 66], 2, 48, 1, None),
        ([20, 131], 1, 128, 2, 40),
        ([257, 515], 1, 16, 1, None),
        ([20, 261], 1, 256, 1, 129),
    ],
)
def test_attention_follows_the_definition(
    library, dtype, lengths, heads, width, group, window, causal
) -> None:
    packed = pack_lengths(lengths)
    states = random_states(packed.tokens, heads, width, group, dtype)
    seen = {"causal": causal, "window": window}
    actual = attend(states, packed, 0.2, **seen, library=library).double()
    close = ATTENTION_CLOSE[dtype]
    expected = exactly(states, packed, 0.2, **seen)
    torch.testing.assert_close(actual, expected, rtol=close, atol=close)


@pytest.mark.parametrize("model", ["encoder", "encoder in int8", "decoder"])
def test_vectors_are_those_of_the_plain_path(model: str, library, dtype, request) -> None:
    # But for a layer in one call, which has addresses of addresses.
    emulated = replace(native_backend(library, dtype), encoder_layer=lambda _: None)
    int8, least = model.endswith("int8"), 0.99 if model.endswith("int8") else 0.995
    plain = Target(CPU, torch.float32, with_attention(torch_backend(), "eager"))
    targets = plain, Target(CPU, dtype, emulated, int8)
    kinds = Outputs(dense=True, sparse=model != "decoder", colbert=model != "decoder")
    if model == "decoder":
        folder = request.getfixturevalue("tiny_qwen")
        exactly, ours = (DenseEmbedder("tiny", folder, 512, each) for each in targets)
    else:
        folder = request.getfixturevalue("tiny_m3")
        exactly, ours = (M3Embedder("tiny", folder, 8192, each) for each in targets)
    assert set(ours.info.paths.values()) <= {"native", "torch"}
    assert ours.info.refused == ()
    ids = [text.ids for text in exactly.tokenize(varied_texts(35)[25:])]
    for actual, exact in zip(*(each.forward(ids, kinds) for each in (ours, exactly)), strict=True):
        pair = (torch.from_numpy(each.dense) for each in (actual, exact))
        assert functional.cosine_similarity(*pair, dim=0) > least
        if kinds.colbert:
            assert (actual.colbert * exact.colbert).sum(1).min() > least - 0.01
            sums = (each.sparse.values.sum() for each in (actual, exact))
            assert abs(next(sums) - next(sums)) < 0.1 * len(actual.colbert)


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
