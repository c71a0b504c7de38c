"""The decoder: its config.json, and its states against those of transformers' own modules."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModel, Qwen3Config, Qwen3ForCausalLM

from smart_embedder.errors import StartupError
from smart_embedder.models.batch import pack
from smart_embedder.models.checkpoint.weights import Weights
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.families.load import load_decoder
from smart_embedder.models.families.qwen3 import DecoderConfig
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.ops.native import load_library
from smart_embedder.models.ops.proof import Target
from tests.support.packed_reference import packed_states, register

CPU = torch.device("cpu")
LENGTHS = (5, 17, 5, 1, 44, 17, 3, 68, 100)
NAMES = ["sdpa", "matmul", "eager"] + (["native"] if load_library() else [])


def target(attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Target:
    return Target(CPU, dtype, choose_backend(CPU, dtype, attention))


def save(folder: Path, kind=AutoModel.from_config, **changes) -> Path:
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = Qwen3Config(vocab_size=120, max_position_embeddings=3000, **(shape | changes))
    torch.manual_seed(0)
    model = kind(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path)


def load(folder: Path, how: Target) -> Backbone:
    return load_decoder(folder, how, Weights.read(folder), ())


def random_sequences(lengths=LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 120, length) for length in lengths]


@torch.inference_mode()
def states_of(folder: Path, how: Target, lengths=LENGTHS) -> torch.Tensor:
    backbone = load(folder, how)
    packed = backbone.pack(random_sequences(lengths))
    states = backbone.forward(packed)
    assert states.dtype == backbone.dtype == how.dtype
    return states[: packed.real_tokens]


@torch.inference_mode()
def expected_states(folder: Path, lengths=LENGTHS) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder, attn_implementation=register()).eval()
    return packed_states(model, pack(random_sequences(lengths), device=CPU))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (1100, 3)])
def test_float32_states_are_those_of_transformers(folder: Path, attention, lengths) -> None:
    actual = states_of(folder, target(attention), lengths)
    torch.testing.assert_close(actual, expected_states(folder, lengths), rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", NAMES)
@torch.inference_mode()
def test_what_is_shared_has_the_states_of_each_text_alone(folder: Path, attention: str) -> None:
    half = attention in {"matmul", "native"}
    backbone = load(folder, target(attention, torch.bfloat16 if half else torch.float32))
    (query,) = random_sequences((40,))
    tails = random_sequences((9, 1, 70, 30))
    texts = [query, *(np.concatenate((query, tail)) for tail in tails), query[:14:-1]]
    packed = backbone.pack(texts)
    assert packed.sharing is not None
    # Rounded up, as the row is.
    assert len(packed.sharing.unique) == 40 + 9 + 1 + 70 + 30 + 25 + 1
    states = backbone.forward(packed)
    for place, ids in zip(packed.unpack_order, texts, strict=True):
        alone = backbone.pack([ids])
        assert alone.sharing is None
        torch.testing.assert_close(
            states[packed.offsets[place] : packed.offsets[place + 1]],
            backbone.forward(alone)[: len(ids)],
            **({"rtol": 0.05, "atol": 0.05} if half else {"rtol": 0, "atol": 1e-5}),
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 6},
        {"hidden_size": 36, "head_dim": 32, "intermediate_size": 50},
        {"num_hidden_layers": 1, "rms_norm_eps": 0.1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        {"kind": Qwen3ForCausalLM},  # With a vocabulary's head.
    ],
)
def test_every_shape_is_computed(changes, tmp_path: Path) -> None:
    save(tmp_path, **changes)
    torch.testing.assert_close(
        states_of(tmp_path, target()), expected_states(tmp_path), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("attention", NAMES)
@pytest.mark.parametrize(
    "changes", [{}, {"hidden_size": 128, "intermediate_size": 192}, {"intermediate_size": 50}]
)
def test_bfloat16_states_point_where_those_in_float32_do(attention, changes, tmp_path) -> None:
    save(tmp_path, **changes)
    actual = states_of(tmp_path, target(attention, torch.bfloat16)).float()
    assert functional.cosine_similarity(actual, expected_states(tmp_path)).min() > 0.999


def test_a_text_does_not_depend_on_its_company(folder: Path) -> None:
    how = target("native" if load_library() else "sdpa", torch.bfloat16)
    together = states_of(folder, how, (44, 700))
    alone = states_of(folder, how, (44,))
    torch.testing.assert_close(together[:44].float(), alone.float(), rtol=0, atol=0.05)


SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 100,
}


def read(folder: Path, **changes) -> DecoderConfig:
    config = {"model_type": "qwen3"} | SIZES | changes
    (folder / "config.json").write_text(json.dumps(config))
    return DecoderConfig.read(folder)


def test_what_is_left_out_is_as_in_transformers(tmp_path: Path) -> None:
    ours, theirs = read(tmp_path), Qwen3Config()
    assert ours.head_width == theirs.head_dim
    assert ours.epsilon == theirs.rms_norm_eps
    assert ours.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1_000_000},
        {"rope_theta": 1_000_000, "rope_scaling": None},
        {"rope_theta": 5, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    ],
)
def test_the_rotarys_base_is_read_where_any_version_writes_it(changes, tmp_path: Path) -> None:
    assert read(tmp_path, **changes).theta == 1e6


def test_parameters_are_those_of_the_products(tmp_path: Path) -> None:
    config = read(tmp_path, head_dim=16)
    assert config.parameters == 2 * 32 * (2 * 4 * 16 + 2 * 2 * 16 + 3 * 64)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gpt2"}, "of type gpt2, not a Qwen3 model"),
        ({"hidden_act": "gelu"}, "has hidden_act gelu; known here: silu"),
        ({"attention_bias": True}, "has attention_bias True; known here: False"),
        ({"use_sliding_window": True}, "has use_sliding_window True; known here: False"),
        ({"rope_scaling": {"type": "yarn"}}, "rotary positions of type yarn; known here: default"),
        ({"rope_parameters": {"rope_type": "linear"}}, "positions of type linear"),
        ({"rope_parameters": "none"}, "no usable rope_parameters: none"),
        ({"rope_theta": "high"}, "no usable rope_theta: high"),
        ({"rope_theta": 0}, "no usable rope_theta: 0"),
        ({"rms_norm_eps": -1}, "no usable rms_norm_eps: -1"),
        ({"num_key_value_heads": 3}, "4 heads of 128 numbers, which 3 heads of keys cannot serve"),
        ({"head_dim": 7}, "4 heads of 7 numbers"),
        ({"num_hidden_layers": 0}, "no usable num_hidden_layers: 0"),
        ({"max_position_embeddings": None}, "no usable max_position_embeddings: None"),
    ],
)
def test_what_cannot_be_computed_is_told(changes, sentence, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=sentence):
        read(tmp_path, **changes)
