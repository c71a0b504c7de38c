"""Operations of every backend on a CPU.

`models/families/test_registry.py` compares PyTorch's operations with transformers' models.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from smart_embedder.kernels.backend import (
    Backend,
    Columns,
    LayerNorm,
    QuantizedRows,
    RmsNorm,
    onednn_backend,
    torch_backend,
)
from smart_embedder.kernels.cuda import fused_backend
from smart_embedder.kernels.native import native_backend
from smart_embedder.kernels.proof import prove_paths
from smart_embedder.kernels.target import DECODER, GPU_ENCODER, Shapes, Target
from tests.support.emulated_kernels import CAN_EMULATE, EmulatedKernels
from tests.support.native import ACTIVATIONS, LIBRARIES

PLAIN = torch_backend()
BACKENDS = {
    "torch": PLAIN,
    "onednn": onednn_backend(torch.bfloat16),
    **{native.instructions.name: native_backend(native, torch.bfloat16) for native in LIBRARIES},
}
if CAN_EMULATE:
    BACKENDS["fused"] = fused_backend(EmulatedKernels(torch.bfloat16), torch.bfloat16, PLAIN)
on_a_cpu = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
SHAPES = {"count": st.integers(1, 70), "width": st.integers(1, 20).map(lambda n: 16 * n)}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape).to(dtype)


def random_layer(width: int, out: int, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(width * out)
    return nn.Linear(width, out).to(dtype)


def random_layer_norm(width: int) -> LayerNorm:
    return LayerNorm(*torch.unbind(random(2, width, dtype=torch.float32)), 1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@on_a_cpu
@torch.inference_mode()
def test_linear_puts_outputs_of_layers_side_by_side(backend, activation) -> None:
    layers = [random_layer(32, out) for out in (32, 16, 48)]
    states = random(5, 32)
    actual = backend.linear(layers, activation)(states)
    expected = torch.cat([ACTIVATIONS[activation](layer(states)) for layer in layers], dim=1)
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("backend", [PLAIN, onednn_backend(torch.float32)])
def test_linear_of_one_float32_layer_does_not_copy_weights(backend: Backend) -> None:
    layer = random_layer(32, 32, torch.float32)
    compute = backend.linear([layer])
    with torch.inference_mode():
        layer.weight.zero_()
        layer.bias.fill_(3)
        assert (compute(torch.randn(2, 32)) == 3).all()


@on_a_cpu
@pytest.mark.parametrize(
    ("activation", "largest"),
    [("silu", 3e38), ("relu", 3e38), ("gelu", 1e9), ("gelu_pytorch_tanh", 1e9)],
)
def test_gate_of_large_numbers_is_closed_or_open(backend: Backend, activation, largest) -> None:
    gate = torch.tensor([-largest, -200.0, -90.0, 0.0, 90.0, largest] + [0.0] * 10)
    states = torch.cat([gate, torch.ones(16)])[None].bfloat16()
    expected = gate.clamp(min=0)[None].bfloat16()
    torch.testing.assert_close(backend.gate(states, activation), expected)


def plain_columns(factors: Tensor) -> Columns:
    """One column for each channel."""
    none = torch.empty(0, dtype=torch.int32)
    return Columns(factors, none, torch.full((len(factors),), 0.5))


def restored(rows: QuantizedRows) -> Tensor:
    return rows.values.float() * rows.scale + rows.minimum


@on_a_cpu
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_stay_in_their_row(backend: Backend, odd: float) -> None:
    states = random(4, 64)
    states[1, 3] = odd
    for result in (
        backend.linear([random_layer(64, 64)], "gelu")(states),
        backend.add_norm(states.clone(), random(5, 64)[1:], random_layer_norm(64)),
        backend.rms_norm(states, RmsNorm(random(64), 1e-6)),
        backend.gate(states.clone(), "silu"),
    ):
        assert result.isfinite().all(1).tolist() == [True, False, True, True]
    bytes_of_rows = restored(backend.quantize_rows(states, plain_columns(torch.ones(64))))
    assert bytes_of_rows.isfinite().any(1).tolist() == [True, False, True, True]


def rows_of_any_size(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Draw rows of very different size whose middle is not 0."""
    torch.manual_seed(count * width)
    rows = torch.randn(count, width) + torch.randn(count, 1)
    return (rows * torch.logspace(-2, 2, count)[:, None]).to(dtype)


@on_a_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(**SHAPES)
@settings(max_examples=30)
def test_quantize_rows_has_255_steps_of_each_rows_range(
    backend: Backend, dtype, count, width
) -> None:
    states, factors = rows_of_any_size(count, width, dtype), torch.rand(width) + 0.1
    rows = backend.quantize_rows(states, plain_columns(factors))
    expected = states.float() * factors
    spread = expected.amax(1, keepdim=True) - expected.amin(1, keepdim=True)
    assert ((restored(rows) - expected).abs() <= 0.501 * spread / 255 + 1e-6).all()


@on_a_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 36])
def test_quantize_rows_with_repeated_columns_is_finer(backend, dtype, width) -> None:
    states, channel, count = rows_of_any_size(40, width, dtype), 5, 17
    factors, repeated = torch.ones(width), torch.full((count - 1,), channel, dtype=torch.int32)
    indices = torch.arange(float(count))
    offsets = torch.cat([torch.full((width,), 0.5), (indices[1:] + 0.5) / count])
    offsets[channel] = 0.5 / count
    rows = backend.quantize_rows(states, Columns(factors, repeated, offsets))
    columns = restored(rows)[:, [channel, *range(width, width + count - 1)]].double()
    expected = states[:, channel].double()
    spread = (states.amax(1) - states.amin(1)).double()
    assert ((columns.mean(1) - expected).abs() <= 0.51 * spread / 255 / count + 1e-5).all()


# The kernels in CUDA on a CPU.

emulated = pytest.mark.skipif(not CAN_EMULATE, reason="needs g++ and an x86 processor")


@emulated
@pytest.mark.parametrize(
    ("shapes", "operations"),
    [
        (Shapes(256, 320, 4, 4, 64, "gelu"), (*GPU_ENCODER, "float8_rows")),
        (Shapes(128, 192, 4, 2, 128, bias=False, causal=True), DECODER),
        (Shapes(33, 70, 3, 3, 11, "relu"), (*GPU_ENCODER, "float8_rows")),
    ],
)
def test_cuda_kernels_pass_the_proof(shapes: Shapes, operations) -> None:
    target = Target(torch.device("cpu"), torch.bfloat16, BACKENDS["fused"])
    proofs = [proof for name in operations for proof in prove_paths(target, shapes, name)]
    by_kernels = {proof.operation for proof in proofs if proof.path == "fused"}
    assert by_kernels == {*operations} - {"attention", "add_linear"}
    assert [proof for proof in proofs if not proof.holds] == []


@emulated
@torch.inference_mode()
def test_cuda_embed_gives_nan_for_unknown_tokens_and_positions() -> None:
    tables = random(18, 1024).split([11, 7])
    indices = torch.tensor([10, 11, 3, -1, 0, 0]), torch.tensor([6, 0, 7, 0, -1, 0])
    norm = LayerNorm(*random(2, 1024), 1e-5)
    rows = BACKENDS["fused"].embed(indices, tables, norm)
    assert rows.isnan().all(1).tolist() == [False, True, True, True, True, False]
