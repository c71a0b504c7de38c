"""Qwen3 by transformers' modules, packed, against their own padded forward; and its faults."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, Qwen3Config

from app.errors import StartupError
from app.models.attention import choose_attention
from app.models.backbone import Backbone, Target
from app.models.transformers_model import load_transformer, make_backbone

CPU = torch.device("cpu")
LENGTHS = (5, 17, 5, 1, 44, 17, 3, 68)


def target(attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Target:
    return Target(CPU, dtype, choose_attention(attention, CPU, dtype))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = Qwen3Config(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=100,
    )
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, how: Target) -> Backbone:
    return make_backbone(load_transformer(AutoModel, folder, how), how)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.inference_mode()
def test_the_packed_forward_equals_the_padded_one(attention: str, folder: Path) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(5, 120, length) for length in LENGTHS]
    backbone = load(folder, target(attention))
    packed = backbone.pack(sequences)
    hidden = backbone.forward(packed)
    theirs = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    for place, ids in zip(packed.unpack_order, sequences, strict=True):
        expected = theirs(input_ids=torch.from_numpy(ids)[None]).last_hidden_state[0]
        actual = hidden[packed.offsets[place] : packed.offsets[place + 1]]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_the_longest_text_is_what_the_model_has_positions_for(folder: Path) -> None:
    assert load(folder, target()).max_length == 100


@torch.inference_mode()
def test_the_forward_runs_in_the_target_dtype(folder: Path) -> None:
    backbone = load(folder, target(dtype=torch.bfloat16))
    packed = backbone.pack([np.arange(5, 20)])
    assert backbone.forward(packed).dtype == backbone.dtype == torch.bfloat16


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    if tensor is not None:
        weights[name] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_tensor_is_never_filled_with_random_numbers(folder: Path) -> None:
    change(folder, "layers.1.mlp.up_proj.weight", None)
    with pytest.raises(StartupError, match="lacks the tensor layers.1.mlp.up_proj.weight"):
        load(folder, target())


def test_a_tensor_of_another_shape_is_an_error(folder: Path) -> None:
    change(folder, "norm.weight", torch.ones(31))
    with pytest.raises(StartupError, match="another shape for the tensor|cannot be loaded"):
        load(folder, target())


def test_a_truncated_weight_file_is_an_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StartupError, match="weights in .* cannot be loaded"):
        load(folder, target())
