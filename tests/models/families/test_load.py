"""Models are loaded from their files: packed forwards against transformers' own padded ones."""

import copy
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    BertConfig,
    PretrainedConfig,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint.weights import Weights
from smart_embedder.models.device.choose import cpu_has_int8
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.families.load import load_decoder, load_encoder, load_tokenizer
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.ops.proof import Target

CPU = torch.device("cpu")
SIZE = {
    "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 70,
}  # fmt: skip
CONFIGS = {
    "xlm-roberta": XLMRobertaConfig(**SIZE, pad_token_id=1),
    "roberta": RobertaConfig(**SIZE, pad_token_id=1),
    "bert": BertConfig(**SIZE),
    "qwen3": Qwen3Config(**SIZE, num_key_value_heads=2, head_dim=16),
}
ENCODERS = [family for family in CONFIGS if family != "qwen3"]
MAPS = Path("/proc/self/maps")


def target(dtype: torch.dtype = torch.float32, **options) -> Target:
    return Target(CPU, dtype, choose_backend(CPU, dtype, "sdpa"), **options)


def load(folder: Path, how: Target | None = None) -> Backbone:
    """For what is not in 8 bits: calibration alone reads texts."""
    how = how or target()
    if Qwen3Config.model_type in (folder / "config.json").read_text():
        return load_decoder(folder, how, Weights.read(folder), ())
    return load_encoder(folder, how, tokenizer=None)


def save(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModel.from_config(copy.deepcopy(config)).save_pretrained(folder)
    return folder


def random_sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 120, length) for length in (5, 17, 5, 1, 44, 17, 3, 68)]


def padded_states(folder: Path, sequences: list[np.ndarray]) -> list[torch.Tensor]:
    """transformers' own forward over one padded batch, attention computed eagerly."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    rows = [torch.from_numpy(ids) for ids in sequences]
    padding = model.config.pad_token_id or 0
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    states = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    return [state[: len(row)] for state, row in zip(states, rows, strict=True)]


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_packed_forward_equals_the_padded_one(family: str, tmp_path: Path) -> None:
    folder, sequences = save(CONFIGS[family], tmp_path), random_sequences()
    backbone = load(folder)
    assert backbone.max_length == (68 if "roberta" in family else 70)
    packed = backbone.pack(sequences)
    hidden = backbone.forward(packed)
    for index, expected in enumerate(padded_states(folder, sequences)):
        place = packed.unpack_order[index]
        actual = hidden[packed.offsets[place] : packed.offsets[place + 1]]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell what is mapped")
@pytest.mark.parametrize("save_as", ["safetensors", "bin"])
@pytest.mark.parametrize(
    "how",
    [target(), target(torch.bfloat16), target(torch.bfloat16, quantized=True)],
    ids=["float32", "bfloat16", "int8"],
)
@torch.inference_mode()
def test_its_files_are_left_and_may_be_written_over(
    how: Target, save_as: str, tiny_m3: Path, tmp_path: Path
) -> None:
    if how.quantized and not cpu_has_int8():
        pytest.skip("needs an x86 processor with AVX2")
    folder = shutil.copytree(tiny_m3, tmp_path / "model")
    path = folder / "model.safetensors"
    if save_as == "bin":
        torch.save(load_file(path), folder / "pytorch_model.bin")
        path.unlink()
        path = folder / "pytorch_model.bin"
    backbone = load_encoder(folder, how, load_tokenizer(folder, 8192))
    packed = backbone.pack(random_sequences())
    before = backbone.forward(packed)
    assert str(folder) not in MAPS.read_text()
    assert str(path) not in {each.path for each in psutil.Process().open_files()}
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
        file.truncate(100)
    assert torch.equal(backbone.forward(packed), before)
    assert backbone.dtype == how.dtype


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "encoder.layer.1.output.dense.weight"),
        ("bert", "encoder.layer.0.attention.output.LayerNorm.bias"),
        ("bert", "embeddings.token_type_embeddings.weight"),
        ("qwen3", "layers.1.mlp.up_proj.weight"),
        ("qwen3", "norm.weight"),
    ],
)
def test_a_missing_tensor_and_one_of_another_shape_are_never_made_up(
    family: str, name: str, tmp_path: Path
) -> None:
    path = save(CONFIGS[family], tmp_path) / "model.safetensors"
    weights = load_file(path)
    for tensor, sentence in (torch.zeros(31), "another shape for"), (None, "lacks"):
        weights.pop(name)
        if tensor is not None:
            weights[name] = tensor
        save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(StartupError, match=f"{sentence} the tensor {name}"):
            load(tmp_path)
