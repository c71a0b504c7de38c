"""The lean encoder against transformers' own modules, packed alike, for any shape of checkpoint."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModel, BertConfig, RobertaConfig, XLMRobertaConfig

from smart_embedder.models.batch.packing import PositionScheme, pack
from smart_embedder.models.checkpoint.weights import Weights
from smart_embedder.models.families.bert import EncoderConfig, EncoderParameters, make_encoder
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


def parameters_of(model) -> EncoderParameters:
    config = model.config
    roberta = config.model_type != "bert"
    return EncoderParameters(
        Weights(Path("model"), model.state_dict()),
        EncoderConfig(
            vocabulary=config.vocab_size,
            width=config.hidden_size,
            inner_width=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            positions=config.max_position_embeddings,
            types=config.type_vocab_size,
            activation=config.hidden_act,
            epsilon=config.layer_norm_eps,
            padding=config.pad_token_id if roberta else None,
        ),
        CPU,
        model.dtype,
    )


def states_of(model, sequences, attention: str = "sdpa") -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states by the encoder, and by transformers' modules with the same parameters."""
    parameters = parameters_of(model)
    positions = parameters.config.position_scheme
    packed = pack(sequences, device=CPU, positions=positions, multiple=32)
    with torch.inference_mode():
        types = torch.zeros_like(packed.input_ids)
        expected = packed_states(model, packed, token_type_ids=types)
        actual = make_encoder(parameters, choose_backend(CPU, model.dtype, attention))(packed)
    assert actual.dtype == model.dtype
    # What rounds the row up belongs to nobody.
    return actual[: packed.real_tokens], expected[: packed.real_tokens]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", CONFIGS)
def test_float32_states_are_those_of_transformers(family: str, attention: str) -> None:
    model = make_model(make_config(family))
    torch.testing.assert_close(*states_of(model, random_sequences(), attention), rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize(
    ("width", "heads", "layers"), [(64, 4, 2), (24, 3, 1), (90, 2, 2), (1024, 16, 1)]
)
def test_every_shape_and_activation_is_computed(width, heads, layers, activation) -> None:
    config = make_config(
        "xlm-roberta", width=width, heads=heads, layers=layers, hidden_act=activation
    )
    actual, expected = states_of(make_model(config), random_sequences())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [(1,), (3000,), (513, 2), (7,) * 40])
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
    parameters = parameters_of(make_model(make_config("xlm-roberta", width=32, layers=37)))
    packed = pack(random_sequences(), device=CPU, positions=PositionScheme(1))
    first = replace(parameters.config, layers=3)
    encoders = []
    for config in (parameters.config, first):
        parameters.config = config
        encoders.append(make_encoder(parameters, choose_backend(CPU, torch.float32)))
    deep, three_layers = encoders
    assert torch.equal(deep.with_fewer_layers()[0](packed), three_layers(packed))
