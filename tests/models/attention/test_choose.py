"""Every kernel against the padded reference; the names a setting may take."""

import math
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import StartupError
from app.models.attention import choose as attention
from app.models.batch.packing import PackedBatch, pack
from app.settings import Settings

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def by_hand(query, key, value, cu_seqlens, *, scale: float, causal: bool) -> torch.Tensor:
    """Attention one sequence, one head and one query at a time, straight from its definition."""
    heads, tokens, _ = query.shape
    group = heads // key.shape[0]
    output = torch.zeros(tokens, heads, value.shape[2])
    for start, stop in pairwise(cu_seqlens):
        for head in range(heads):
            for place in range(start, stop):
                last = place + 1 if causal else stop
                keys = key[head // group, start:last]
                weights = torch.softmax(keys @ query[head, place] * scale, dim=0)
                output[place, head] = weights @ value[head // group, start:last]
    return output


@pytest.fixture
def varlen_on_cpu():
    """PyTorch's varlen operator has no CPU kernel: give it one that follows its documentation."""

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, is_causal, scale, window, gqa=False, *_):
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert max_q == max_k == int(cu_q.diff().max())
        assert window == ([-1, 0] if is_causal else [-1, -1])
        assert gqa or q.shape[1] == k.shape[1]
        states = (states.transpose(0, 1) for states in (q, k, v))
        output = by_hand(*states, cu_q.tolist(), scale=scale, causal=is_causal)
        return output, q.new_empty(0), q.new_empty(0)

    operator = torch.library.Library("torch_attn", "IMPL", "CPU")
    operator.impl("_varlen_attn", kernel, allow_override=True)
    yield
    operator._destroy()


def random_case(
    lengths: list[int], heads: int, kv_heads: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], PackedBatch]:
    torch.manual_seed(sum(lengths))
    packed = pack([np.zeros(length, np.int64) for length in lengths], device=CPU)
    tokens = sum(lengths)
    states = tuple(torch.randn(count, tokens, 8) for count in (heads, kv_heads, kv_heads))
    return states, packed


def check(kernel: attention.Kernel, lengths: list[int], kv_heads: int, *, causal: bool) -> None:
    states, packed = random_case(lengths, 4, kv_heads)
    scale = 1 / math.sqrt(8)
    actual = kernel(*states, packed, scale=scale, causal=causal)
    expected = by_hand(*states, packed.offsets.tolist(), scale=scale, causal=causal)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


LENGTHS = st.lists(st.integers(1, 9) | st.integers(14, 18), min_size=1, max_size=6)


@pytest.mark.parametrize("kernel", [attention.eager, attention.sdpa, attention.matmul])
@given(lengths=LENGTHS, kv_heads=st.sampled_from([4, 2, 1]), causal=st.booleans())
@settings(max_examples=30)
def test_kernel_follows_the_definition(kernel, lengths, kv_heads, causal) -> None:
    check(kernel, lengths, kv_heads, causal=causal)


@pytest.mark.parametrize("kernel", [attention.eager, attention.sdpa, attention.matmul])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_stays_within_its_sequence(kernel, causal, value) -> None:
    """Short ones of near lengths share a padded block, equal ones a dense one."""
    lengths = [3, 5, 5, 17, 18, 70, 70]
    states, packed = random_case(lengths, 4, 4)
    clean = kernel(*states, packed, scale=0.35, causal=causal)
    for poisoned in range(len(lengths)):
        start, stop = packed.offsets[poisoned], packed.offsets[poisoned + 1]
        damaged = tuple(state.clone() for state in states)
        for state in damaged:
            state[:, start] = value
        output = kernel(*damaged, packed, scale=0.35, causal=causal)
        assert not output[start:stop].isfinite().all()
        output[start:stop] = clean[start:stop]
        torch.testing.assert_close(output, clean)


@pytest.mark.parametrize("kernel", [attention.sdpa, attention.matmul])
@pytest.mark.parametrize("causal", [False, True])
def test_what_rounds_the_row_up_gets_finite_states(kernel, causal: bool) -> None:
    packed = pack([np.zeros(5, np.int64)], device=CPU, multiple=32)
    states = (torch.randn(4, 32, 8) for _ in range(3))
    output = kernel(*states, packed, scale=1.0, causal=causal)
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_varlen_is_called_as_its_documentation_says(varlen_on_cpu, kv_heads, causal) -> None:
    check(attention.load_kernel("varlen"), [3, 1, 7, 3], kv_heads, causal=causal)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        (CPU, torch.float32, "sdpa"),
        (CUDA, torch.float16, "varlen"),
        (CUDA, torch.float32, "sdpa"),
    ],
)
def test_auto_takes_the_fastest_kernel_that_runs(device, dtype, expected) -> None:
    assert attention.resolve_name("auto", device, dtype) == expected


@pytest.mark.parametrize(
    ("amx", "library", "expected"),
    [(True, object(), "sdpa"), (False, object(), "native"), (False, None, "matmul")],
)
def test_auto_in_bfloat16_on_a_cpu_depends_on_amx_and_the_kernels(
    monkeypatch, amx, library, expected
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx})
    monkeypatch.setattr(attention, "load_library", lambda: library)
    assert attention.resolve_name("auto", CPU, torch.bfloat16) == expected


def test_without_the_kernels_theirs_cannot_be_had(monkeypatch) -> None:
    monkeypatch.setattr(attention, "load_library", lambda: None)
    with pytest.raises(StartupError, match=r"python -m app\.models\.kernels\.build builds them"):
        attention.load_kernel("native")


@pytest.mark.parametrize("name", ["varlen", "flash_attention_2", "flash_attention_3"])
def test_a_gpu_kernel_on_a_cpu_stops_the_start(name) -> None:
    with pytest.raises(StartupError, match=f"ATTENTION={name} needs an NVIDIA GPU"):
        attention.choose_attention(name, CPU, torch.float32)


def test_a_flash_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(StartupError, match="needs the package flash-attn, which is not installed"):
        attention.choose_attention("flash_attention_2", CUDA, torch.float16)


@pytest.mark.parametrize(
    ("device", "dtype", "where"),
    [(CPU, torch.float32, "float32 on cpu"), (CUDA, torch.bfloat16, "bfloat16 on cuda")],
)
def test_the_kernel_in_c_is_for_bfloat16_on_a_cpu(device, dtype, where) -> None:
    with pytest.raises(StartupError, match=f"ATTENTION=native needs a CPU and .* {where}; set"):
        attention.choose_attention("native", device, dtype)


@pytest.mark.parametrize("name", ["matmul", "sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_runs_everywhere_may_be_named(name: str, dtype: torch.dtype) -> None:
    assert attention.choose_attention(name, CPU, dtype) == name


def test_every_name_that_health_can_show_may_be_set() -> None:
    names = set(get_args(Settings.model_fields["attention"].annotation))
    shown = {"varlen", *attention._FLASH_MODULES, "native", "matmul", "sdpa", "eager"}
    assert names == shown | {"auto"}
