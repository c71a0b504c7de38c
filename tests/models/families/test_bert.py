"""The encoder: its config.json, and its states against those of transformers' own modules."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModel, BertConfig, RobertaConfig, XLMRobertaConfig

from smart_embedder.errors import StartupError
from smart_embedder.models.batch import PositionScheme, pack
from smart_embedder.models.checkpoint.weights import Weights
from smart_embedder.models.families.bert import Encoder, EncoderConfig, make_encoder
from smart_embedder.models.ops.choose import choose_backend
from tests.support.packed_reference import packed_states, register

CPU = torch.device("cpu")
CONFIGS = {"xlm-roberta": XLMRobertaConfig, "roberta": RobertaConfig, "bert": BertConfig}
LENGTHS = (5, 17, 5, 1, 44, 17, 3, 68, 100)


def make_config(family: str, *, width: int = 64, heads: int = 4, layers: int = 3, **changes):
    return CONFIGS[family](
        vocab_size=120,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=width * 3,
        max_position_embeddings=8194,
        pad_token_id=0 if family == "bert" else 1,
        **changes,
    )


def make_model(config, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation=register(), add_pooling_layer=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).eval()


def random_sequences(lengths=LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    # 0 and 1 are padding tokens, which a text may spell out.
    return [rng.integers(0, 120, length) for length in lengths]


def config_of(model) -> EncoderConfig:
    config = model.config
    return EncoderConfig(
        vocabulary=config.vocab_size,
        width=config.hidden_size,
        inner_width=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        positions=config.max_position_embeddings,
        types=config.type_vocab_size,
        activation=config.hidden_act,
        epsilon=config.layer_norm_eps,
        padding=None if config.model_type == "bert" else config.pad_token_id,
    )


def encoder_of(model, config: EncoderConfig, attention: str = "sdpa") -> Encoder:
    weights = Weights(Path("model"), model.state_dict(), dtype=model.dtype)
    return make_encoder(weights, config, choose_backend(CPU, model.dtype, attention), model.dtype)


def states_of(model, sequences, attention: str = "sdpa") -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states by the encoder, and by transformers' modules with the same parameters."""
    config = config_of(model)
    packed = pack(sequences, device=CPU, positions=config.position_scheme, multiple=32)
    with torch.inference_mode():
        types = torch.zeros_like(packed.input_ids)
        expected = packed_states(model, packed, token_type_ids=types)
        actual = encoder_of(model, config, attention)(packed)
    assert actual.dtype == model.dtype
    # What rounds the row up belongs to nobody.
    return actual[: packed.real_tokens], expected[: packed.real_tokens]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", CONFIGS)
def test_float32_states_are_those_of_transformers(family: str, attention: str) -> None:
    model = make_model(make_config(family))
    torch.testing.assert_close(*states_of(model, random_sequences(), attention), rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
@pytest.mark.parametrize(
    ("width", "heads", "layers"), [(64, 4, 2), (24, 3, 1), (90, 2, 2), (1024, 16, 1)]
)
def test_every_shape_and_activation_is_computed(width, heads, layers, activation) -> None:
    config = make_config(
        "xlm-roberta", width=width, heads=heads, layers=layers, hidden_act=activation
    )
    actual, expected = states_of(make_model(config), random_sequences())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [(1,), (1500,), (513, 2), (7,) * 40])
def test_every_length_is_computed(lengths: tuple[int, ...]) -> None:
    model = make_model(make_config("xlm-roberta", width=32, layers=2))
    actual, expected = states_of(model, random_sequences(lengths))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_bfloat16_states_point_where_those_in_float32_do(family: str) -> None:
    config = make_config(family, width=256, layers=4)
    exact, _ = states_of(make_model(config), random_sequences())
    actual, transformers = states_of(make_model(config, torch.bfloat16), random_sequences())
    worst = functional.cosine_similarity(actual.float(), exact).min()
    assert worst > 0.9995
    assert worst > functional.cosine_similarity(transformers.float(), exact).min() - 1e-4


def test_one_of_fewer_layers_has_the_first_of_them() -> None:
    model = make_model(make_config("xlm-roberta", width=32, layers=37))
    packed = pack(random_sequences(), device=CPU, positions=PositionScheme(1))
    config = config_of(model)
    few, times = encoder_of(model, config).with_fewer_layers()
    assert times == 37 / 3
    assert torch.equal(few(packed), encoder_of(model, replace(config, layers=3))(packed))


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
    ("model_type", "theirs"), [("xlm-roberta", XLMRobertaConfig()), ("bert", BertConfig())]
)
def test_what_is_left_out_is_as_in_transformers(model_type, theirs, tmp_path: Path) -> None:
    ours = read(tmp_path, model_type)
    assert ours.positions == theirs.max_position_embeddings
    assert ours.types == theirs.type_vocab_size
    assert ours.activation == theirs.hidden_act
    assert ours.epsilon == theirs.layer_norm_eps
    assert ours.padding in {None, theirs.pad_token_id}


def test_roberta_counts_positions_from_behind_the_padding_id(tmp_path: Path) -> None:
    assert read(tmp_path, max_position_embeddings=70, pad_token_id=1).max_length == 68
    assert read(tmp_path, "bert", max_position_embeddings=70, pad_token_id=1).max_length == 70


@pytest.mark.parametrize(
    ("model_type", "types", "offset"),
    [("bert", 2, 70), ("bert", 3, 70), ("bert", 1, 0), ("xlm-roberta", 2, 0), ("roberta", 1, 0)],
)
def test_only_a_bert_with_types_reads_a_second_segment_behind_the_first(
    tmp_path: Path, model_type, types, offset
) -> None:
    sizes = {"max_position_embeddings": 70, "type_vocab_size": types, "pad_token_id": 3}
    config = read(tmp_path, model_type, **sizes)
    padding = None if model_type == "bert" else 3
    assert config.position_scheme == PositionScheme(padding, offset)
    assert config.reads_segments == bool(offset)


@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
def test_positions_that_nothing_computes_are_refused(tmp_path: Path, kind: str) -> None:
    assert read(tmp_path, position_embedding_type="absolute").width == 32
    with pytest.raises(StartupError, match=f"has positions of type {kind}, which transformers"):
        read(tmp_path, position_embedding_type=kind)


def test_parameters_are_those_of_the_products(tmp_path: Path) -> None:
    assert read(tmp_path).parameters == 2 * (4 * 32 * 32 + 2 * 32 * 64)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gpt2"}, "of type gpt2; known here: xlm-roberta, "),
        ({"model_type": None}, "of type None; known here"),
        ({"is_decoder": True}, "holds a decoder; an encoder is needed"),
        ({"hidden_act": "tanh"}, "the activation tanh; known here: gelu, gelu_new"),
        ({"hidden_act": ["gelu"]}, "the activation .* known here"),
        ({"hidden_size": 30}, "30 numbers, which 4 heads cannot share"),
        ({"num_hidden_layers": 0}, "no usable num_hidden_layers: 0"),
        ({"intermediate_size": "64"}, "no usable intermediate_size: 64"),
        ({"vocab_size": None}, "no usable vocab_size: None"),
        ({"vocab_size": True}, "no usable vocab_size: True"),
        ({"pad_token_id": -1}, "no usable pad_token_id: -1"),
        ({"layer_norm_eps": "small"}, "no usable layer_norm_eps: small"),
    ],
)
def test_what_makes_no_sense_is_told(changes, sentence, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=sentence):
        read(tmp_path, **changes)
