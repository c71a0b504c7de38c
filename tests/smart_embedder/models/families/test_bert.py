"""The encoder's config.json: values, defaults, and values that cannot be used."""

import json
from pathlib import Path

import pytest
from transformers import BertConfig, XLMRobertaConfig

from smart_embedder.errors import StartupError
from smart_embedder.kernels.packed_batch import PositionScheme
from smart_embedder.models.families.bert import EncoderConfig

SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def read(folder: Path, model_type: str = "xlm-roberta", **changes) -> EncoderConfig:
    config = SIZES | {"model_type": model_type} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return EncoderConfig.read(folder)


@pytest.mark.parametrize(
    ("model_type", "reference"), [("xlm-roberta", XLMRobertaConfig()), ("bert", BertConfig())]
)
def test_bert_defaults_are_those_of_transformers(model_type, reference, tmp_path: Path) -> None:
    config = read(tmp_path, model_type)
    assert config.positions == reference.max_position_embeddings
    assert config.types == reference.type_vocab_size
    assert config.activation == reference.hidden_act
    assert config.epsilon == reference.layer_norm_eps
    assert config.padding in {None, reference.pad_token_id}
    # The weights of the products alone.
    assert config.parameters == 2 * (4 * 32 * 32 + 2 * 32 * 64)


@pytest.mark.parametrize(
    ("model_type", "types", "length", "offset"),
    [
        ("bert", 3, 70, 70),
        ("bert", 1, 70, 0),
        ("xlm-roberta", 2, 66, 0),
        ("roberta", 1, 66, 0),
    ],
)
def test_bert_and_roberta_positions_and_segments(
    tmp_path: Path, model_type, types, length, offset
) -> None:
    sizes = {"max_position_embeddings": 70, "type_vocab_size": types, "pad_token_id": 3}
    config = read(tmp_path, model_type, **sizes)
    padding = None if model_type == "bert" else 3
    assert config.max_length == length
    assert config.position_scheme == PositionScheme(padding, offset)
    assert config.reads_segments == bool(offset)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gpt2"}, "of type gpt2; supported: xlm-roberta, "),
        ({"is_decoder": True}, "holds a decoder; an encoder is needed"),
        ({"is_causal": True}, "holds a decoder; an encoder is needed"),
        ({"hidden_act": "tanh"}, "the activation tanh; supported: gelu, gelu_new"),
        ({"hidden_act": ["gelu"]}, "the activation .* supported"),
        ({"hidden_size": 30}, "30 numbers, which 4 heads cannot share"),
        ({"num_hidden_layers": 0}, "no usable num_hidden_layers: 0"),
        ({"pad_token_id": -1}, "no usable pad_token_id: -1"),
        ({"layer_norm_eps": "small"}, "no usable layer_norm_eps: small"),
        ({"position_embedding_type": "relative_key"}, "positions of type relative_key, which tr"),
    ],
)
def test_bert_config_refuses_unusable_values(changes, sentence, tmp_path: Path) -> None:
    assert read(tmp_path, position_embedding_type="absolute").width == 32
    with pytest.raises(StartupError, match=sentence):
        read(tmp_path, **changes)
