"""The decoder's config.json: values, defaults, and values that cannot be used."""

import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from smart_embedder.errors import StartupError
from smart_embedder.models.families.qwen3 import DecoderConfig, find_other_option

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


def test_qwen3_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config, reference = read(tmp_path), Qwen3Config()
    assert config.head_width == reference.head_dim
    assert config.epsilon == reference.rms_norm_eps
    assert config.theta == reference.rope_parameters["rope_theta"]
    assert config.tied == reference.tie_word_embeddings
    # The weights of the products alone.
    assert config.parameters == 2 * 32 * (2 * 4 * 128 + 2 * 2 * 128 + 3 * 64)


OTHERS = {"rope_theta": 7.0, "rope_type": "default"}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1_000_000, "rope_scaling": None},
        {"rope_theta": 5, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}, "rope_parameters": OTHERS},
        {"rope_scaling": {"rope_theta": 1e6}, "rope_parameters": OTHERS},
    ],
)
def test_rope_theta_is_read_as_any_version_writes_it(changes, tmp_path: Path) -> None:
    assert read(tmp_path, **changes).theta == 1e6
    assert Qwen3Config.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        (
            {"rope_parameters": OTHERS, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rotary positions of type yarn",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters {'full_attention': {}}"),
        ({"layer_types": ["full_attention"]}, None),
        ({"layer_types": ["sliding_attention"]}, "layer_types ['sliding_attention']"),
    ],
)
def test_options_that_transformers_computes_are_found(changes, option) -> None:
    assert find_other_option({"model_type": "qwen3"} | SIZES | changes) == option


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gpt2"}, "of type gpt2, not a Qwen3 model"),
        ({"hidden_act": "gelu"}, "has hidden_act gelu, which is not supported for this use"),
        ({"rope_scaling": {"type": "yarn"}}, "has rotary positions of type yarn, which is not"),
        ({"rope_theta": 0}, "no usable rope_theta: 0"),
        ({"rms_norm_eps": -1}, "no usable rms_norm_eps: -1"),
        ({"num_key_value_heads": 3}, "4 heads of 128 numbers, which 3 heads of keys cannot serve"),
        ({"head_dim": 7}, "4 heads of 7 numbers"),
        ({"max_position_embeddings": None}, "no usable max_position_embeddings: None"),
    ],
)
def test_qwen3_config_refuses_unusable_values(changes, sentence, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=sentence):
        read(tmp_path, **changes)
