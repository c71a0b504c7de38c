"""Encoders and decoders in 8 bits, and their products, compared with float32."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.nn import functional

from smart_embedder.hardware.device import cpu_has_int8
from smart_embedder.kernels.backend import QuantizedLinear
from smart_embedder.kernels.target import choose_backend
from smart_embedder.models.families.int8 import quantize
from tests.smart_embedder.models.families.states import (
    CPU,
    load,
    random_sequences,
    states_of,
    target,
)
from tests.support.checkpoints import corpus, save_sentencepiece_tokenizer
from tests.support.encoders import save_transformer
from tests.support.native import ACTIVATIONS

pytestmark = pytest.mark.skipif(not cpu_has_int8(), reason="needs an x86 processor with AVX2")
# In bfloat16, which runs beside int8 if the processor has it.
BACKEND = choose_backend(CPU, torch.bfloat16)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_sentencepiece_tokenizer(folder, corpus())
    return folder


def save_model(folder: Path, tokenizer_folder: Path, family: str, **changes) -> Path:
    save_transformer(folder, family, **{"vocab_size": 1200} | changes)
    shutil.copy(tokenizer_folder / "tokenizer.json", folder)
    return folder


LENGTHS = (5, 17, 5, 1, 44, 3, 100)


@pytest.mark.parametrize(
    ("family", "changes", "lengths", "dtype"),
    [
        ("xlm-roberta", {}, LENGTHS, torch.float32),
        ("bert", {"hidden_act": "relu"}, (250,), torch.bfloat16),
        # Calibration texts are cut to the positions.
        ("roberta", {"max_position_embeddings": 50}, (48, 3), torch.bfloat16),
        # A width that no kernel supports.
        ("bert", {"hidden_size": 66, "num_attention_heads": 2}, (9, 30), torch.float32),
    ],
)
def test_int8_encoder_states_are_near_float32(
    family, changes, lengths, dtype, tokenizer_folder, tmp_path
) -> None:
    folder = save_model(tmp_path, tokenizer_folder, family, **changes)
    sequences = random_sequences(lengths, 1200)
    exact = states_of(folder, target(), sequences)
    actual = states_of(folder, target(dtype, quantized=True), sequences)
    assert functional.cosine_similarity(actual.float(), exact).min() > 0.99


def random_layer(width: int, out: int) -> nn.Linear:
    torch.manual_seed(width + out)
    layer = nn.Linear(width, out)
    # Channels of very different size, as in trained models.
    layer.weight.data *= torch.rand(out, 1) * 10
    return layer


def quantized(layers, states, activation=None, dtype=torch.float32) -> QuantizedLinear:
    return quantize(layers, states, BACKEND, dtype, activation)


def worst_cosine(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return functional.cosine_similarity(actual.float(), expected.float(), dim=1).min().item()


@pytest.mark.parametrize(
    ("width", "out", "dtype", "activation"),
    [
        (64, 192, torch.float32, "gelu"),
        (64, 192, torch.bfloat16, "relu"),
        (35, 7, torch.float32, None),
        (35, 7, torch.bfloat16, "gelu_new"),
        (1024, 256, torch.float32, "relu"),
        (1024, 256, torch.bfloat16, None),
    ],
)
@torch.inference_mode()
def test_int8_products_of_states_of_any_range(width, out, dtype, activation) -> None:
    layers = [random_layer(width, out), random_layer(width, 48)]
    states = torch.randn(50, width)
    product = quantized(layers, states, activation, dtype)
    actual = product(states.to(dtype))
    assert actual.dtype == dtype
    expected = torch.cat([ACTIVATIONS[activation](layer(states)) for layer in layers], 1)
    # Not row by row: rows whose channels are all near 0 would only compare rounding errors.
    assert (actual.float() - expected).norm() < 0.02 * expected.norm()
    if activation is None:
        states = (states + torch.randn(50, 1)) * torch.logspace(-3, 3, 50)[:, None]
        states = functional.gelu(states).to(dtype)
        exact = torch.cat([layer(states.float()) for layer in layers], 1)
        assert worst_cosine(product(states), exact) > 0.999


@torch.inference_mode()
def test_int8_channels_that_calibration_never_used() -> None:
    layer = random_layer(64, 256)
    states = torch.randn(60, 64)
    seen = states.clone()
    seen[:, 20:] = 0
    assert worst_cosine(quantized([layer], seen)(states), layer(states)) > 0.99
    assert quantized([layer], torch.zeros(5, 64))(states).isfinite().all()


@pytest.mark.parametrize("channels", [1, 12])
@torch.inference_mode()
def test_int8_large_channels_do_not_blur_the_others(channels: int) -> None:
    layer = random_layer(64, 256)
    states = functional.gelu(torch.randn(60, 64))
    states[:, :channels] *= 100
    layer.weight.data[:, :channels] /= 100
    assert worst_cosine(quantized([layer], states)(states), layer(states)) > 0.999
    # Large in a few rows only, as for the first and last token of a text in trained models.
    layer, states = random_layer(384, 256), torch.randn(60, 384)
    states[::20, 7] = 40
    assert worst_cosine(quantized([layer], states)(states), layer(states)) > 0.9998


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_int8_decoder_states_are_near_float32(dtype, tiny_qwen: Path) -> None:
    with capture_logs() as logs:
        exact = load(tiny_qwen, target())
        quantized_model = load(tiny_qwen, target(dtype, "auto", quantized=True))
    assert not logs
    assert quantized_model.target.describe("tiny").dtype == "int8"
    # Some sequences share a prefix, which is computed once.
    sequences = [ids % 600 + 3 for ids in random_sequences(LENGTHS, 1200)]
    sequences += [np.concatenate([sequences[-1], ids]) for ids in sequences[:3]]
    packed = quantized_model.pack(sequences)
    assert packed.sharing is not None
    states = quantized_model.forward(packed)
    expected = exact.forward(packed)
    cosines = functional.cosine_similarity(states.float(), expected)[: packed.real_tokens]
    assert cosines.min() > 0.99
    for index, ids in zip(packed.unpack_order, sequences, strict=True):
        alone = quantized_model.forward(quantized_model.pack([ids]))[: len(ids)]
        start, stop = packed.offsets[index], packed.offsets[index + 1]
        assert torch.equal(alone, states[start:stop])
