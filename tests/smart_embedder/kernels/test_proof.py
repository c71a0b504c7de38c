"""The proof at the start: correct paths are used, all others are refused."""

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from structlog.testing import capture_logs

from smart_embedder.errors import StartupError
from smart_embedder.hardware.device import cpu_has_int8
from smart_embedder.kernels import backend
from smart_embedder.kernels.attention import sdpa
from smart_embedder.kernels.backend import Backend, make_add_linear, torch_backend
from smart_embedder.kernels.native import native_backend
from smart_embedder.kernels.proof import prove, prove_paths, try_path
from smart_embedder.kernels.target import (
    DECODER,
    GPU_ENCODER,
    INT8_OPERATIONS,
    Shapes,
    Target,
    choose_backend,
)
from tests.support.native import LIBRARIES

CPU = torch.device("cpu")
M3 = Shapes(256, 512, 4, 4, 64, "gelu")
QWEN = Shapes(256, 384, 4, 2, 128, bias=False, causal=True)
ODD = Shapes(33, 70, 3, 3, 11, "relu")


def target(backend: Backend, dtype: torch.dtype = torch.float32, *, named: bool = False) -> Target:
    return Target(CPU, dtype, backend, attention_named=named)


def planted(error: Exception | None = None) -> Backend:
    """Make a backend whose gate is wrong, or raises an error."""

    def gate(states, activation):
        if error is not None:
            raise error
        result = torch_backend().gate(states, activation)
        result[-1, -1] += 1
        return result

    return torch_backend().prefer("planted", gate=gate)


def with_faulty_attention(backend: Backend, **changes) -> Backend:
    """Prefer an attention that returns 1.1 times the result, or computes with other options."""

    def attend(states, packed, **options):
        return sdpa(states, packed, **options | changes) * (1 if changes else 1.1)

    return backend.prefer("planted", attention=attend)


def backends() -> Iterator[tuple[Backend, torch.device, torch.dtype]]:
    """Yield every backend of this machine; `test_backend` has the CUDA kernels on a CPU."""
    for dtype in (torch.float32, torch.bfloat16):
        yield choose_backend(CPU, dtype), CPU, dtype
        yield from ((native_backend(native, dtype), CPU, dtype) for native in LIBRARIES[1:])
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
        cuda = torch.device("cuda")
        yield choose_backend(cuda, torch.bfloat16), cuda, torch.bfloat16


@pytest.mark.device
@pytest.mark.parametrize(("backend", "device", "dtype"), list(backends()))
@pytest.mark.parametrize("shapes", [M3, QWEN, ODD])
def test_proof_holds_for_every_path_of_this_machine(shapes: Shapes, backend, device, dtype) -> None:
    operations = (*(DECODER if shapes.causal else GPU_ENCODER), "float8_rows")
    if device == CPU and cpu_has_int8():
        operations = (*operations, *INT8_OPERATIONS)
    tried = Target(device, dtype, backend)
    proofs = [proof for name in operations for proof in prove_paths(tried, shapes, name)]
    assert [proof for proof in proofs if not proof.holds] == []
    assert {proof.operation for proof in proofs} == set(operations)
    proven = prove(tried, shapes, operations)
    assert proven.refused == ()
    assert proven.paths["attention"] == backend.fastest("attention")


@pytest.mark.parametrize(
    ("actual", "expected", "share"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[2.0, 4.0]], [[1.0, 2.0]], 1.0),  # Relative to the expected number, not the actual one.
        ([[-3.0, 4.0]], [[-4.0, 4.0]], 0.25),
        ([[1.0], [5.0], [1.0]], [[1.0], [4.0], [2.0]], 0.5),  # The largest of several.
        ([[1.0, math.nan]], [[1.0, 2.0]], math.inf),
        ([[1.0], [math.nan]], [[1.0], [2.0]], math.inf),
        ([[1.0]], [[1.0, 1.0]], math.inf),
    ],
)
def test_difference_is_relative_to_the_largest_expected_number(actual, expected, share) -> None:
    results, right = ([torch.tensor(row) for row in rows] for rows in (actual, expected))
    for tolerance in (1e9,) if math.isinf(share) else (share, share / 2):
        proof = try_path("gate", "own", lambda: results, right, tolerance)
        assert (proof.operation, proof.path) == ("gate", "own")
        assert proof.difference == pytest.approx(share)
        assert proof.holds == (share <= tolerance)


@pytest.mark.parametrize(
    ("error", "reason", "logged"),
    [
        (None, r"differs by \d\.\de-\d\d, allowed are 1e-04", ""),
        (NotImplementedError("no kernel\nat all"), "raises NotImplementedError", ": no kernel"),
    ],
)
def test_faulty_path_is_refused_with_one_warning(error, reason, logged) -> None:
    backend = planted(error)
    before = backend.gate
    with capture_logs() as logs:
        proven = prove(target(backend), QWEN, DECODER)
    assert proven.paths["gate"] == "torch"
    (refused,) = proven.refused
    assert (refused.operation, refused.path) == ("gate", "planted")
    assert re.fullmatch(reason, refused.reason)
    (line,) = logs
    assert line["event"] == "path_refused"
    assert (line["path"], line["used_instead"]) == ("planted", "torch")
    assert line["reason"] == refused.reason + logged
    states = torch.randn(5, 64)
    assert torch.equal(proven.backend.gate(states, "silu"), torch_backend().gate(states, "silu"))
    # The backend of other models stays the same.
    assert backend.gate is before


def test_faulty_attention_stops_the_start_only_if_it_is_named() -> None:
    backend = with_faulty_attention(planted())
    with pytest.raises(StartupError, match="ATTENTION=planted does not compute"):
        prove(target(backend, named=True), QWEN, DECODER)
    # Other operations of the backend may still be replaced.
    assert prove(target(planted(), named=True), QWEN, DECODER).paths["gate"] == "torch"
    proven = prove(target(backend), QWEN, DECODER)
    assert (proven.backend.attention, proven.paths["attention"]) == (sdpa, "sdpa")
    assert {proof.operation for proof in proven.refused} == {"gate", "attention"}


def with_activation_left_out(right, layers, activation=None):
    del activation
    return right(layers)


def with_bias_left_out(right, layers, activation=None):
    plain = copy.deepcopy(list(layers))
    for layer in plain:
        layer.bias = None
    return right(plain, activation)


def with_residual_left_out(right, layer):
    add = right(layer)
    return lambda states, residual: add(states, torch.zeros_like(residual))


def without(field: str, fill: float):
    """Make a fault that leaves one of the norm's parameters out."""

    def faulty(right, *states_and_norm):
        *states, norm = states_and_norm
        return right(*states, replace(norm, **{field: torch.full_like(getattr(norm, field), fill)}))

    return faulty


def with_rotation(change):
    return lambda right, states, norm, embedding: right(states, norm, change(embedding))


def with_a_head_too_many(right, states, norm, embedding):
    right(states, norm, embedding)
    states[:, len(norm.weight)] *= 2


def with_lengths_of_other_rows(right, states, dtype, indices=None):
    rows, lengths = right(states, dtype, indices)
    return rows, lengths if indices is None else lengths.flip(0)


def with_columns(**changes):
    def faulty(right, states, columns):
        return right(states, replace(columns, **{k: f(columns) for k, f in changes.items()}))

    return faulty


def with_weights(field: str, fill: float):
    def faulty(right, weights, dtype, activation=None):
        left_out = torch.full_like(getattr(weights, field), fill)
        return right(replace(weights, **{field: left_out}), dtype, activation)

    return faulty


def in_16_bits(right, weights, dtype, activation=None):
    """Compute as instructions that sum pairs of products in 16 bits, which large weights exceed."""
    gemm = right(weights, dtype, activation)

    def faulty(rows):
        pairs = rows.values.double().clamp(max=200)
        return gemm(replace(rows, values=pairs.to(torch.uint8)))

    return faulty


def with_exchanged_halves(right, states, activation):
    return right(torch.cat(states.chunk(2, -1)[::-1], -1), activation)


# Faults that a kernel for each operation may have, and the shapes that show them.
FAULTS = [
    ("linear", with_bias_left_out, M3),
    ("linear", with_activation_left_out, M3),
    ("linear", lambda right, layers, activation=None: right(layers[::-1], activation), QWEN),
    ("add_linear", with_residual_left_out, QWEN),
    ("embed", lambda right, rows, tables, norm: right(rows[::-1], tables, norm), M3),
    ("embed", lambda right, rows, tables, norm: right(rows, (tables[0],) * 2, norm), M3),
    ("embed", without("bias", 0), M3),
    (
        "add_norm",
        lambda right, states, residual, norm: right(states, torch.zeros_like(residual), norm),
        M3,
    ),
    ("add_norm", without("weight", 1), M3),
    ("add_norm", without("bias", 0), M3),
    ("rms_norm", without("weight", 1), QWEN),
    ("rotary", with_rotation(lambda at: replace(at, sines=-at.sines)), QWEN),
    ("rotary", with_rotation(lambda at: replace(at, cosines=at.cosines.roll(1, 0))), QWEN),
    ("rotary", with_a_head_too_many, QWEN),
    ("gate", with_exchanged_halves, QWEN),
    ("gate", lambda right, states, _: right(states, "silu"), QWEN),
    ("unit_rows", lambda right, states, dtype, *_: right(states, dtype), M3),
    ("unit_rows", with_lengths_of_other_rows, M3),
    ("quantize_rows", with_columns(factors=lambda old: torch.ones_like(old.factors)), M3),
    ("quantize_rows", with_columns(repeated=lambda old: old.repeated.flip(0)), M3),
    ("int8_gemm", with_weights("scale", 1e-3), M3),
    ("int8_gemm", with_weights("sums", 0), M3),
    ("int8_gemm", with_weights("bias", 0), M3),
    ("int8_gemm", in_16_bits, M3),
    ("int8_gemm", lambda right, weights, dtype, *_: right(weights, dtype), M3),
    ("float8_rows", lambda right, *rows: (right(*rows)[0], right(*rows)[1] * 1.1), M3),
    ("float8_rows", lambda right, *rows: (right(*rows)[0].roll(1, 0), right(*rows)[1]), QWEN),
    ("float8_rows", lambda right, rows, _: right(rows), M3),
    ("float8_product", lambda right, *given: right(*given[:2], None, given[3]), M3),
    ("float8_product", lambda right, rows, *given: right((rows[0], rows[1] * 2), *given), QWEN),
]


@pytest.mark.parametrize(("operation", "fault", "shapes"), FAULTS)
def test_proof_finds_each_fault_of_an_operation(operation, fault, shapes) -> None:
    right = torch_backend()
    faulty = partial(fault, getattr(right, operation))
    backend = right.prefer("faulty", **{operation: faulty})
    small = replace(shapes, width=64, inner_width=96)
    shown, plain = prove_paths(target(backend), small, operation)
    assert (shown.path, shown.holds, shown.error) == ("faulty", False, None)
    assert (plain.path, plain.holds) == ("torch", True)


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [({"causal": False}, QWEN), ({"causal": True}, M3), ({"scale": 1.0}, M3)],
)
def test_proof_finds_an_attention_with_other_options(changes, shapes) -> None:
    backend = with_faulty_attention(torch_backend(), **changes)
    small = replace(shapes, heads=4, key_heads=2)
    shown, *plain = prove_paths(target(backend), small, "attention")
    assert (shown.path, shown.holds) == ("planted", False)
    assert all(proof.holds for proof in plain)


def test_device_without_a_correct_path_stops_the_start(monkeypatch) -> None:
    right = backend.gate

    def wrong_in_bfloat16(states, activation):
        return right(states, activation) * (1 if states.dtype is torch.float32 else 2)

    monkeypatch.setattr(backend, "gate", wrong_in_bfloat16)
    with pytest.raises(StartupError, match="does not compute gate correctly"):
        prove(target(torch_backend(), torch.bfloat16), QWEN, DECODER)


def test_add_linear_does_not_use_a_refused_linear() -> None:
    right = torch_backend()

    def twice(layers, activation=None):
        return lambda states: 2 * right.linear(layers, activation)(states)

    backend = right.prefer("planted", linear=twice, add_linear=make_add_linear(twice))
    proven = prove(target(backend), QWEN, DECODER)
    assert {proof.operation for proof in proven.refused} == {"linear", "add_linear"}
    assert (proven.paths["linear"], proven.paths["add_linear"]) == ("torch", "torch")
