"""A layer in one or two calls compared with the same layer as single operations."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from smart_embedder.kernels.attention import sdpa
from smart_embedder.kernels.backend import Backend, EncoderParts, LayerNorm
from smart_embedder.kernels.native import native_backend
from smart_embedder.models.families.bert import EncoderLayer
from smart_embedder.models.families.int8 import quantize
from tests.support.native import LIBRARIES, needs_kernels
from tests.support.packed_attention import pack_lengths

pytestmark = [needs_kernels, pytest.mark.long]


@pytest.fixture(scope="module", params=[False, True], ids=["exact", "int8"])
def quantized(request) -> bool:
    return request.param


def make_parts(
    backend: Backend, width: int, inner: int, heads: int, dtype, *, quantized: bool, **changes
) -> EncoderParts:
    torch.manual_seed(width + inner)
    numbers = torch.bfloat16 if dtype is torch.bfloat16 and not quantized else torch.float32

    def product(depth: int, out: int, count: int = 1, activation: str | None = None):
        layers = [nn.Linear(depth, out, dtype=numbers) for _ in range(count)]
        if quantized:
            return quantize(layers, torch.randn(20, depth), backend, dtype, activation)
        return backend.linear(layers, activation)

    norm = LayerNorm(torch.rand(width) + 0.5, torch.randn(width), 1e-5)
    parts = {
        "to_query_key_value": product(width, width, 3),
        "from_attended": product(width, width),
        "to_inner": product(width, inner, activation="gelu"),
        "from_inner": product(inner, width),
    }
    return EncoderParts(backend, heads, attention_norm=norm, output_norm=norm, **(parts | changes))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    heads=st.sampled_from([1, 2, 4]),
    head=st.sampled_from([16, 32, 64, 128]),
    inner=st.sampled_from([64, 192, 2112]),
)
@settings(max_examples=8)
@torch.inference_mode()
def test_encoder_layer_has_the_bits_of_the_single_operations(
    backend, dtype, quantized, lengths, heads, head, inner
) -> None:
    parts = make_parts(backend, max(64, heads * head), inner, heads, dtype, quantized=quantized)
    layer, packed = EncoderLayer.of(parts), pack_lengths(lengths, multiple=8)
    states = torch.randn(packed.tokens, len(parts.output_norm.weight)).to(dtype)
    before = states.clone()
    expected = replace(layer, calls=None)(states.clone(), packed, backend.attention)
    assert torch.equal(layer.calls.forward(states, packed), expected)
    attended = layer.calls.attention(states, packed)
    assert torch.equal(layer.calls.feed_forward(attended, states), expected)
    assert torch.equal(layer(states, packed, backend.attention), expected)
    assert torch.equal(states, before)


@torch.inference_mode()
def test_encoder_layer_needs_native_parts_and_the_backends_dtype() -> None:
    backend = native_backend(LIBRARIES[0], torch.float32)

    def parts(width: int = 64, heads: int = 4, by: Backend = backend, **changes) -> EncoderParts:
        return make_parts(by, width, 64, heads, torch.float32, quantized=False, **changes)

    assert backend.encoder_layer(parts())
    assert not backend.encoder_layer(parts(width=320, heads=1))
    assert not backend.encoder_layer(parts(by=replace(backend, attention=sdpa)))
    assert not backend.encoder_layer(parts(to_inner=nn.Linear(64, 64)))
    assert not backend.encoder_layer(parts(width=80, heads=5))
    states = torch.zeros(8, 64, dtype=torch.float64)
    with pytest.raises(ValueError, match="a kernel needs"):
        backend.encoder_layer(parts()).forward(states, pack_lengths([3], multiple=8))
