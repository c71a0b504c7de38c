"""A decoder's passes over rows: the definition in float64, and the kernels in C against it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from app.models.ops.decoder_rows import DecoderRows, PyTorchRows, RmsNorm, Rotation
from app.models.ops.native_decoder_rows import NativeRows, choose_decoder_rows
from app.models.ops.native_library import load_library

CPU = torch.device("cpu")
LIBRARY = load_library()
WAYS: list[DecoderRows] = [PyTorchRows(), *([NativeRows(LIBRARY)] if LIBRARY else [])]
every_way = pytest.mark.parametrize("rows", WAYS, ids=lambda rows: type(rows).__module__)
# Of what is rounded to bfloat16 at the end, and in between by PyTorch.
CLOSE = {"rtol": 2**-6, "atol": 2**-7}


def random(*shape: int) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape).bfloat16()


def exact_norm(states: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    states = states.double()
    size = (states.square().mean(-1, keepdim=True) + norm.epsilon).sqrt()
    return states / size * norm.weight.double()


@every_way
@given(count=st.integers(1, 40), width=st.integers(1, 300), size=st.sampled_from([1e-3, 1, 50]))
@settings(max_examples=40, deadline=None)
def test_rows_are_normalised(rows: DecoderRows, count: int, width: int, size: float) -> None:
    states, norm = random(count, width) * size, RmsNorm(random(width), 1e-6)
    actual = rows.norm(states, norm)
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual.double(), exact_norm(states, norm), **CLOSE)


@every_way
@given(
    positions=st.lists(st.integers(0, 40_000), min_size=1, max_size=30),
    heads=st.integers(1, 5),
    others=st.integers(0, 3),
    half=st.integers(1, 70),
)
@settings(max_examples=40, deadline=None)
def test_heads_are_normalised_and_turned(rows: DecoderRows, positions, heads, others, half) -> None:
    states = random(len(positions), heads + others, 2 * half)
    before, norm = states.clone(), RmsNorm(random(heads, 2 * half), 1e-6)
    rows.turn(states, norm, Rotation.of(torch.tensor(positions), 2 * half, 1e6))
    frequencies = 1e6 ** -(torch.arange(half).double() / half)
    turn = torch.polar(
        torch.ones(len(positions), half).double(), torch.tensor(positions)[:, None] * frequencies
    )
    first, second = exact_norm(before[:, :heads], norm).chunk(2, dim=-1)
    turned = torch.complex(first, second) * turn[:, None]
    # An angle of 40,000 in float32 is known to 0.002.
    torch.testing.assert_close(
        states[:, :heads].double(), torch.cat([turned.real, turned.imag], -1), rtol=0.02, atol=0.05
    )
    assert torch.equal(states[:, heads:], before[:, heads:])


@every_way
@given(count=st.integers(1, 40), sixteens=st.integers(1, 20), size=st.sampled_from([0.1, 1, 100]))
@settings(max_examples=40, deadline=None)
def test_one_half_of_a_row_gates_the_other(rows: DecoderRows, count, sixteens, size) -> None:
    states = random(count, 32 * sixteens) * size
    gate, through = states.double().chunk(2, dim=-1)
    torch.testing.assert_close(rows.gate(states).double(), functional.silu(gate) * through, **CLOSE)


@every_way
def test_a_gate_that_reaches_far_is_shut_or_open(rows: DecoderRows) -> None:
    gate = torch.tensor([-3e38, -200.0, -90.0, 0.0, 90.0, 3e38] + [0.0] * 10)
    states = torch.cat([gate, torch.ones(16)])[None].bfloat16()
    torch.testing.assert_close(rows.gate(states), gate.clamp(min=0)[None].bfloat16())


@every_way
def test_what_is_not_a_number_stays_in_its_row(rows: DecoderRows) -> None:
    states = random(4, 32)
    states[1, 3] = torch.nan
    for result in (rows.norm(states, RmsNorm(random(32), 1e-6)), rows.gate(states)):
        assert result[1].isnan().any()
        assert not result[[0, 2, 3]].isnan().any()


def test_what_the_kernels_cannot_compute_is_pytorchs() -> None:
    assert isinstance(choose_decoder_rows(CPU, torch.float32, 64), PyTorchRows)
    assert isinstance(choose_decoder_rows(CPU, torch.bfloat16, 50), PyTorchRows)
