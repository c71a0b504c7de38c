"""Attention in PyTorch compared with its definition, choice by name, and support by devices."""

import math
import sys
import warnings
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from smart_embedder.errors import StartupError
from smart_embedder.kernels import attention
from smart_embedder.kernels import packed_batch as batch
from smart_embedder.kernels.attention import (
    Attention,
    PackedAttention,
    QueryKeyValue,
    _flash_attention,
    attend_by_matmul,
    eager,
    exclude_unattended,
    has_flash_attention,
    load_attention,
    matmul,
    memory_efficient,
    require_attention_support,
    sdpa,
    varlen,
)
from smart_embedder.kernels.packed_batch import UNATTENDED, PackedBatch, pack
from tests.support.packed_attention import by_definition, pack_lengths, random_states

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


@pytest.fixture
def cuda_kernels_on_cpu():
    """Give the CUDA operators CPU kernels that follow their documentation."""

    def flash(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, _mask, *,
        scale, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert max_q == max_k == int(cu_q.diff().max())
        states = (states.transpose(0, 1) for states in (q, k, v))
        reach = tuple(
            -1 if size is None else size for size in (window_size_left, window_size_right)
        )
        output = by_definition(states, cu_q.tolist(), scale, causal=causal, reach=reach)
        empty = q.new_empty(0)
        return output, empty, empty, empty, empty

    def efficient(q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, mask, log_sum=False, *, scale):
        assert q.shape[2] == k.shape[2] == v.shape[2]
        states = (q[0], k[0], v[0])
        output, *_ = flash(*states, cu_q, cu_k, max_q, max_k, 0.0, mask == 1, False, scale=scale)
        empty = q.new_empty(0)
        return output[None], empty, empty, empty, max_q, max_k

    operators = torch.library.Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced.
        operators.impl("_flash_attention_forward", flash, allow_override=True)
        operators.impl("_efficient_attention_forward", efficient, allow_override=True)
    yield
    operators._destroy()


def random_case(lengths: list[int], kv_heads: int) -> tuple[QueryKeyValue, PackedBatch]:
    """Draw states of four query heads, several of which may share a key head."""
    packed = pack_lengths(lengths)
    return random_states(packed.tokens, kv_heads, 8, 4 // kv_heads, torch.float32), packed


def check(attend: Attention, lengths: list[int], kv_heads: int, *, causal: bool) -> None:
    states, packed = random_case(lengths, kv_heads)
    scale = 1 / math.sqrt(8)
    actual = attend(states, packed, scale=scale, causal=causal)
    expected = by_definition(states, packed.offsets, scale, causal=causal)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


LENGTHS = st.lists(st.integers(1, 9) | st.integers(14, 18), min_size=1, max_size=6)


@pytest.mark.parametrize("attend", [eager, sdpa, matmul])
@given(lengths=LENGTHS, kv_heads=st.sampled_from([4, 2, 1]), causal=st.booleans())
@settings(max_examples=30)
def test_attention_follows_the_definition(attend, lengths, kv_heads, causal) -> None:
    check(attend, lengths, kv_heads, causal=causal)


@pytest.mark.parametrize("attend", [eager, sdpa, matmul])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_stay_within_their_sequence(attend, causal, value) -> None:
    """Short sequences of similar lengths share a padded block, equal ones a dense block."""
    lengths = [3, 5, 5, 17, 18, 70, 70]
    states, packed = random_case(lengths, 4)
    clean = attend(states, packed, scale=0.35, causal=causal)
    for poisoned in range(len(lengths)):
        start, stop = packed.offsets[poisoned], packed.offsets[poisoned + 1]
        damaged = tuple(state.clone() for state in states)
        for state in damaged:
            state[:, start] = value
        output = attend(damaged, packed, scale=0.35, causal=causal)
        assert not output[start:stop].isfinite().all()
        output[start:stop] = clean[start:stop]
        torch.testing.assert_close(output, clean)


@pytest.mark.parametrize("attend", [sdpa, matmul])
@pytest.mark.parametrize("causal", [False, True])
def test_tokens_that_round_up_get_finite_states(attend, causal: bool) -> None:
    packed = pack_lengths([5], multiple=32)
    output = attend(torch.randn(3, 4, 32, 8).unbind(), packed, scale=1.0, causal=causal)
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("attend", [varlen, memory_efficient])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("call_cost", [256, 0])
def test_varlen_and_memory_efficient_kernels_get_documented_arguments(
    cuda_kernels_on_cpu, monkeypatch, attend, causal, kv_heads, call_cost
) -> None:
    """In one call, and in one call for each length class if a call costs nothing."""
    monkeypatch.setattr(batch, "QUERIES_PER_BLOCK", 2)
    monkeypatch.setattr(batch, "CALL_COST", call_cost)
    check(attend, [3, 1, 7, 3, 1, 9], kv_heads, causal=causal)


def flash_attn_varlen_func(
    q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size
):
    """The function of the package flash-attn, by its documentation."""
    states = (states.transpose(0, 1) for states in (q, k, v))
    return by_definition(states, cu_q.tolist(), softmax_scale, causal=causal, reach=window_size)


@pytest.mark.usefixtures("cuda_kernels_on_cpu")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attend", [varlen, partial(_flash_attention, flash_attn_varlen_func)])
@pytest.mark.parametrize("wrap", [lambda attend: attend, exclude_unattended])
def test_window_of_a_kernel_equals_the_window_in_blocks(attend, causal, wrap) -> None:
    states, packed = random_case([3, 7, 40], 2)
    options = {"scale": 0.3, "causal": causal, "window": 5}
    in_blocks = PackedAttention(sdpa, packed)(states, **options)
    by_kernel = PackedAttention(wrap(attend), packed)
    torch.testing.assert_close(by_kernel(states, **options), in_blocks)
    assert by_kernel._has_window
    everything = by_kernel(states, **options | {"window": None})
    torch.testing.assert_close(everything, sdpa(states, packed, scale=0.3, causal=causal))


@pytest.mark.parametrize("attend", [eager, sdpa, matmul])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_unattended_tokens_attend_to_the_attended_ones(attend, causal, kv_heads) -> None:
    lengths, unattended = [1, 4, 6, 6, 7], [0, 1, 2, 5, 0]
    ids = [np.zeros(length, np.int64) for length in lengths]
    for sequence, count in zip(ids, unattended, strict=True):
        sequence[len(sequence) - count :] = UNATTENDED
    packed = pack(ids, device=CPU)
    states, _ = random_case(lengths, kv_heads)
    actual = exclude_unattended(attend)(states, packed, scale=0.3, causal=causal)
    for start, length, count in zip(packed.offsets, lengths, unattended, strict=False):
        for last in range(length):
            # A token attends to all attended tokens, or causally to those up to itself.
            kept = [token for token in range(length - count) if not causal or token <= last]
            query, *others = (state[:, start : start + length] for state in states)
            keys, values = (state[:, kept].repeat_interleave(4 // kv_heads, 0) for state in others)
            weights = torch.softmax(query[:, [last]] @ keys.mT * 0.3, dim=-1)
            torch.testing.assert_close(actual[start + last], (weights @ values)[:, 0])


def attend_in_blocks(
    states: QueryKeyValue, scale: float, mask: torch.Tensor | None = None, **sizes: int
) -> torch.Tensor:
    """Call `attend_by_matmul` with other sizes of its blocks."""
    output = torch.full(states[0].shape, math.nan, dtype=states[0].dtype)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(attention, name, value)
        attend_by_matmul(states, output, scale=scale, mask=mask)
    return output


def states_in_blocks(count: int, length: int, dtype: torch.dtype) -> QueryKeyValue:
    """Views of one projection `[count x length, 3, heads, width]`, as the encoder passes them."""
    torch.manual_seed(count * length)
    query, key, value = torch.randn(count, length, 3, 4, 8, dtype=dtype).permute(2, 0, 3, 1, 4)
    return query, key, value


@given(
    count=st.integers(1, 9),
    length=st.integers(1, 40),
    max_scores=st.integers(1, 4000),
    min_queries=st.integers(1, 50),
    masked=st.booleans(),
)
@settings(max_examples=60)
def test_matmul_in_blocks_of_any_size_computes_the_same(
    count, length, max_scores, min_queries, masked
) -> None:
    states = states_in_blocks(count, length, torch.float32)
    mask = None
    if masked:
        lengths = torch.randint(1, length + 1, (count, 1, 1, 1))
        mask = torch.where(torch.arange(length) < lengths, 0.0, -torch.inf)
    sizes = {"_MAX_SCORES": max_scores, "_MIN_QUERIES": min_queries, "_FEW_SCORES": 0}
    actual = attend_in_blocks(states, 0.3, mask, **sizes)
    exact = (state.double() for state in states)
    exact_mask = None if mask is None else mask.double()
    expected = functional.scaled_dot_product_attention(*exact, attn_mask=exact_mask, scale=0.3)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("max_scores", "min_queries", "few", "products"),
    [
        (1200, 10, 2400, [1200] * 2),  # Three of six texts at a time, with 400 scores each.
        (1199, 10, 2400, [800] * 3),
        (100, 10, 0, [100] * 24),  # One head of a text at a time.
        (50, 10, 0, [50] * 48),
        (200, 5, 0, [200] * 12),  # Half of the queries of all heads at a time.
        (1200, 10, 2401, []),  # So few scores are left to PyTorch's operator.
    ],
)
def test_matmul_holds_at_most_max_scores(
    monkeypatch, max_scores, min_queries, few, products
) -> None:
    held, multiply = [], torch.bmm

    def watched(left, right):
        held.append(multiply(left, right))
        return held[-1]

    monkeypatch.setattr(torch, "bmm", watched)
    sizes = {"_MAX_SCORES": max_scores, "_MIN_QUERIES": min_queries, "_FEW_SCORES": few}
    attend_in_blocks(states_in_blocks(6, 10, torch.float32), 0.3, **sizes)
    # Every second product is that of the scores with the values.
    assert [product.numel() for product in held[::2]] == products


FLASH = ("varlen", "flash_attention_2", "flash_attention_3")
NEWER = "an NVIDIA GPU of compute capability 8.0 or newer, and float16 or bfloat16"
# The capability of the GPU, an attention, and the device and dtype that it supports.
RUNS = [((8, 0), name, CUDA, torch.float16) for name in FLASH]
RUNS += [((7, 5), name, MPS, torch.float32) for name in ("sdpa", "eager", "matmul")]
RUNS += [((9, 0), "varlen", CUDA, torch.bfloat16), ((8, 0), "native", CPU, torch.float32)]
# The same for devices and dtypes that it does not support, with the words of the message.
LACKS = [
    ((7, 9), "varlen", CUDA, torch.float16, NEWER, "float16 on cuda, which has 7.9"),
    ((8, 0), "native", CUDA, torch.bfloat16, "a CPU", "bfloat16 on cuda, which has 8.0"),
    ((8, 0), "native", MPS, torch.float32, "a CPU", "float32 on mps"),
    *(((8, 0), name, CPU, torch.bfloat16, NEWER, "bfloat16 on cpu") for name in FLASH),
    ((8, 0), "varlen", CUDA, torch.float32, NEWER, "float32 on cuda, which has 8.0"),
]


@pytest.mark.parametrize(("capability", "name", "device", "dtype"), RUNS)
def test_supported_attention_may_be_named(monkeypatch, capability, name, device, dtype) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    require_attention_support(name, device, dtype)
    assert has_flash_attention(device, dtype) is (name in FLASH)


@pytest.mark.parametrize(("capability", "name", "device", "dtype", "needed", "actual"), LACKS)
def test_unsupported_attention_names_its_requirement_and_the_device(
    monkeypatch, capability, name, device, dtype, needed, actual
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(StartupError) as caught:
        require_attention_support(name, device, dtype)
    assert str(caught.value) == (
        f"ATTENTION={name} needs {needed}, but the model runs in {actual}; set ATTENTION to auto"
    )
    assert has_flash_attention(device, dtype) is (name == "native" and device == CUDA)


def test_load_attention_by_name_and_native_needs_the_kernels() -> None:
    named = {"varlen": varlen, "sdpa": sdpa, "matmul": matmul, "eager": eager}
    assert {name: load_attention(name) for name in named} == named
    message = r"are not built, .* with python -m smart_embedder\.kernels\.build"
    with pytest.raises(StartupError, match=message):
        load_attention("native")


@pytest.mark.parametrize(
    ("name", "module"),
    [("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface")],
)
def test_flash_attention_needs_its_package(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StartupError, match=f"ATTENTION={name} needs .*not installed.*{module}"):
        load_attention(name)
    calls = []

    def kernel(query: torch.Tensor, *_: object, **options: object) -> torch.Tensor:
        calls.append(options)
        return query

    package = ModuleType(module)
    package.flash_attn_varlen_func = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, package)
    packed = pack_lengths([3])
    states = torch.zeros(3, 2, 3, 4)
    load_attention(name)(tuple(states), packed, scale=0.5, causal=True)
    assert calls == [{"softmax_scale": 0.5, "causal": True, "window_size": (-1, -1)}]
