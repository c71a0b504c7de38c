"""States of the families implemented here compared with those of transformers' modules."""

import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.nn import functional
from transformers import AutoModel

from smart_embedder.errors import StartupError
from smart_embedder.kernels.native import load_library
from tests.smart_embedder.models.families.states import load, random_sequences, states_of, target
from tests.support.checkpoints import changed_weights
from tests.support.encoders import save_transformer
from tests.support.wordpiece import change

MAPS = Path("/proc/self/maps")
LENGTHS = (5, 17, 5, 1, 44, 17, 3, 68, 100)
NATIVE = ["native"] * (load_library() is not None)


@torch.inference_mode()
def padded_states(folder: Path, sequences: list[np.ndarray]) -> torch.Tensor:
    """Run transformers' forward on one padded batch, with eager attention."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    rows = [torch.from_numpy(ids) for ids in sequences]
    padding = model.config.pad_token_id or 0
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    states = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    return torch.cat([state[: len(row)] for state, row in zip(states, rows, strict=True)])


ENCODER, DECODER = "xlm-roberta", "qwen3"
SMALL = {"hidden_size": 32, "max_position_embeddings": 1600}


@pytest.mark.parametrize(
    ("family", "changes", "lengths"),
    [
        *((family, {}, LENGTHS) for family in ("bert", "roberta", ENCODER, DECODER)),
        (ENCODER, {"hidden_act": "gelu_new"}, LENGTHS),
        (ENCODER, {"hidden_act": "relu", "hidden_size": 90, "num_attention_heads": 2}, LENGTHS),
        *((family, SMALL, lengths) for family in (ENCODER, DECODER) for lengths in ((1,), (1500,))),
        (DECODER, {"num_key_value_heads": 1, "head_dim": 6, "rms_norm_eps": 0.1}, LENGTHS),
        (
            DECODER,
            {
                "kind": "ForCausalLM",  # With a language model's head.
                "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            },
            LENGTHS,
        ),
    ],
)
def test_float32_states_match_transformers(family, changes, lengths, tmp_path: Path) -> None:
    folder, sequences = save_transformer(tmp_path, family, **changes), random_sequences(lengths)
    actual = states_of(folder, target(), sequences)
    torch.testing.assert_close(actual, padded_states(folder, sequences), rtol=0, atol=2e-5)


@pytest.mark.parametrize("attention", ["sdpa", *NATIVE])
@pytest.mark.parametrize(
    ("family", "changes", "least"),
    [
        (ENCODER, {"hidden_size": 128}, 0.9995),
        (DECODER, {"hidden_size": 32, "intermediate_size": 50}, 0.999),
    ],
)
def test_bfloat16_states_are_near_float32(
    family, changes, least, attention, tmp_path: Path
) -> None:
    folder, sequences = save_transformer(tmp_path, family, **changes), random_sequences(LENGTHS)
    exact = padded_states(folder, sequences)
    actual = states_of(folder, target(torch.bfloat16, attention), sequences).float()
    assert functional.cosine_similarity(actual, exact).min() > least


@pytest.mark.parametrize("attention", ["sdpa", "matmul", "eager", *NATIVE])
@torch.inference_mode()
def test_shared_prefixes_have_the_states_of_each_text_alone(attention: str, tmp_path: Path) -> None:
    half = attention in {"matmul", "native"}
    folder = save_transformer(tmp_path, "qwen3", hidden_size=32, intermediate_size=64)
    backbone = load(folder, target(torch.bfloat16 if half else torch.float32, attention))
    (query,) = random_sequences((40,))
    tails = random_sequences((9, 1, 70, 30))
    texts = [query, *(np.concatenate((query, tail)) for tail in tails), query[:14:-1]]
    packed = backbone.pack(texts)
    assert packed.sharing is not None
    # The number of computed tokens is rounded up, too.
    assert len(packed.sharing.unique) == 40 + 9 + 1 + 70 + 30 + 25 + 1
    states = backbone.forward(packed)
    for index, ids in zip(packed.unpack_order, texts, strict=True):
        alone = backbone.pack([ids])
        assert alone.sharing is None
        torch.testing.assert_close(
            states[packed.offsets[index] : packed.offsets[index + 1]],
            backbone.forward(alone)[: len(ids)],
            **({"rtol": 0.05, "atol": 0.05} if half else {"rtol": 0, "atol": 1e-5}),
        )


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not list mapped files")
@torch.inference_mode()
def test_weight_files_are_closed_and_may_be_overwritten(tiny_m3: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_m3, tmp_path / "model")
    path = folder / "model.safetensors"
    backbone = load(folder, target())
    packed = backbone.pack(random_sequences(LENGTHS))
    before = backbone.forward(packed)
    assert str(folder) not in MAPS.read_text()
    assert str(path) not in {file.path for file in psutil.Process().open_files()}
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
        file.truncate(100)
    assert torch.equal(backbone.forward(packed), before)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "encoder.layer.0.attention.output.LayerNorm.bias"),
        ("bert", "embeddings.token_type_embeddings.weight"),
        ("qwen3", "layers.1.mlp.up_proj.weight"),
    ],
)
def test_missing_tensor_or_wrong_shape_stops_the_start(
    family: str, name: str, tmp_path: Path
) -> None:
    folder = save_transformer(tmp_path, family)
    for tensor, sentence in (torch.zeros(31), "another shape for"), (None, "lacks"):
        with changed_weights(folder) as weights:
            del weights[name]
            if tensor is not None:
                weights[name] = tensor
        with pytest.raises(StartupError, match=f"{sentence} the tensor {name}"):
            load(tmp_path, target())


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_config_sizes_that_differ_from_the_weights_stop_the_start(family, tmp_path: Path) -> None:
    config = save_transformer(tmp_path, family) / "config.json"
    content = config.read_text()
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        change(config, **{name: 10**9})
        with pytest.raises(StartupError) as caught:
            load(tmp_path, target())
        assert "\n" not in str(caught.value)
        config.write_text(content)
