"""Checkpoint files of every kind give the same tensors, and each fault its sentence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint.weights import Weights, count_parameters, read_linear

TENSORS = {
    "embeddings.word_embeddings.weight": torch.arange(12.0).view(4, 3),
    "encoder.layer.0.output.LayerNorm.weight": torch.ones(3),
    "encoder.layer.0.output.LayerNorm.bias": torch.zeros(3),
    "encoder.layer.0.output.dense.weight": torch.rand(3, 2),
    "encoder.layer.0.output.dense.bias": torch.rand(3),
}


def save_whole(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")


def save_bin(folder: Path) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")


def save_old_bin(folder: Path) -> None:
    """As PyTorch wrote files before version 1.6."""
    path = folder / "pytorch_model.bin"
    torch.save(TENSORS, path, _use_new_zipfile_serialization=False)


def save_shards(folder: Path) -> None:
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(TENSORS)}
    for file in set(files.values()):
        save_file({name: TENSORS[name] for name in TENSORS if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def save_old_names(folder: Path) -> None:
    """As converted from TensorFlow's BERT."""
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
        for name, tensor in TENSORS.items()
    }
    torch.save(old, folder / "pytorch_model.bin")


@pytest.mark.parametrize("save", [save_whole, save_bin, save_old_bin, save_shards, save_old_names])
def test_every_kind_of_file_gives_the_same_tensors(save, tmp_path: Path) -> None:
    save(tmp_path)
    weights = Weights.read(tmp_path)
    for name, tensor in TENSORS.items():
        assert torch.equal(weights.get(name, *tensor.shape), tensor)


@pytest.mark.parametrize("save", [save_whole, save_bin, save_old_bin])
def test_a_row_a_rounded_tensor_and_one_that_is_only_described(save, tmp_path: Path) -> None:
    save(tmp_path)
    weights = Weights.read(tmp_path)
    name, table = next(iter(TENSORS.items()))
    for index, expected in enumerate(table):
        assert torch.equal(weights.row(name, index, 4, 3), expected)
    rounded = weights.get(name, 4, 3, dtype=torch.bfloat16)
    assert torch.equal(rounded, table.bfloat16())
    described = replace(weights, shapes_only=True).get(name, 4, 3, dtype=torch.float16)
    assert (described.device.type, described.shape, described.dtype) == (
        "meta",
        (4, 3),
        torch.float16,
    )
    layer = weights.linear("encoder.layer.0.output.dense", 2, 3, dtype=torch.bfloat16)
    assert (layer.weight.dtype, layer.bias.dtype) == (torch.bfloat16, torch.bfloat16)
    assert count_parameters(tmp_path) == 12 + 3 + 3 + 6 + 3


def test_of_what_cannot_be_read_no_parameters_are_counted(tmp_path: Path) -> None:
    assert count_parameters(tmp_path) == 0


def test_tensors_that_share_or_are_scattered_over_a_file_are_read_as_they_were(
    tmp_path: Path,
) -> None:
    whole = torch.arange(60.0).view(3, 4, 5)
    tensors = {"t": whole.mT, "part": whole[1:, 1:, 1:], "row": whole[2], "step": whole[..., ::2]}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    weights = Weights.read(tmp_path)
    for name, expected in tensors.items():
        assert torch.equal(weights.get(name, *expected.shape), expected)


@pytest.mark.parametrize(
    ("state", "sizes", "message"),
    [
        ({"weight": torch.ones(4, 3), "bias": torch.zeros(4)}, (3, 4), None),
        ({"weight": torch.ones(4, 3), "bias": torch.zeros(4)}, (3, None), None),
        ({"weight": torch.ones(4, 3), "bias": torch.zeros(4)}, (4, 3), "has the wrong shape"),
        ({"weight": torch.ones(4, 3), "bias": torch.zeros(4)}, (2, None), "has the wrong shape"),
        (
            {"weight": torch.ones(4, 3), "bias": torch.zeros(3)},
            (3, 4),
            r"weight \[4, 3\] and bias \[3\], but \[4, 3\] and \[4\] fit",
        ),
        ({"weight": torch.ones(4, 3)}, (3, 4), "is damaged: 'bias'"),
        (None, (3, 4), "the head head.pt is missing"),
        (b"no archive", (3, 4), "head.pt is damaged"),
    ],
)
def test_a_head_is_its_weight_and_bias_in_a_file_of_its_own(
    tmp_path: Path, state, sizes, message
) -> None:
    path = tmp_path / "head.pt"
    if isinstance(state, bytes):
        path.write_bytes(state)
    elif state is not None:
        torch.save(state, path)
    if message is None:
        head = read_linear(path, *sizes)
        assert torch.equal(head.weight, state["weight"])
        assert torch.equal(head.bias, state["bias"])
    else:
        with pytest.raises(StartupError, match=message):
            read_linear(path, *sizes)


def test_an_empty_tensor_takes_no_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.empty(0, 3), "b": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = Weights.read(tmp_path)
    assert weights.get("a", 0, 3).shape == (0, 3)
    assert torch.equal(weights.get("b", 2), tensors["b"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ((100_000_001).to_bytes(8, "little"), "model.safetensors is no file of safetensors"),
        ((100_000_000).to_bytes(8, "little"), "model.safetensors is cut short"),
        (bytes(7), "model.safetensors is cut short"),
        (
            b'{"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}',
            "has a in F4, which is not known here",
        ),
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
            "ends before its tensor a does",
        ),
    ],
)
def test_why_a_file_cannot_be_read_is_told(tmp_path: Path, content: bytes, reason: str) -> None:
    if content.startswith(b"{"):
        content = len(content).to_bytes(8, "little") + content + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(StartupError, match=f"the weights in .* cannot be loaded: .*{reason}"):
        Weights.read(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_part_of_a_quantized_weight_is_no_weight(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file({"dense.weight": torch.ones(3, 2).to(dtype)}, tmp_path / "model.safetensors")
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(StartupError, match=f"the tensor dense.weight in {name}; take one in float"):
        Weights.read(tmp_path).get("dense.weight", 3, 2)


def test_a_layer_may_have_no_bias(tmp_path: Path) -> None:
    save_whole(tmp_path)
    name, states = "encoder.layer.0.output.dense", torch.rand(5, 2)
    with torch.inference_mode():
        actual = Weights.read(tmp_path).linear(name, 2, 3, bias=False)(states)
    torch.testing.assert_close(actual, states @ TENSORS[f"{name}.weight"].T)


def test_a_linear_layer_is_its_weight_and_its_bias(tmp_path: Path) -> None:
    save_whole(tmp_path)
    states = torch.rand(5, 2)
    name = "encoder.layer.0.output.dense"
    expected = states @ TENSORS[f"{name}.weight"].T + TENSORS[f"{name}.bias"]
    with torch.inference_mode():
        actual = Weights.read(tmp_path).linear(name, 2, 3)(states)
    torch.testing.assert_close(actual, expected)


def test_a_classifiers_encoder_is_found_behind_its_name(tmp_path: Path) -> None:
    save_file({f"roberta.{name}": tensor for name, tensor in TENSORS.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    weights = Weights.read(tmp_path)
    assert "roberta.embeddings.word_embeddings.weight" in weights
    below = weights.before("embeddings.word_embeddings.weight")
    assert "encoder.layer.0.output.dense.bias" in below
    with pytest.raises(StartupError, match="lacks the tensor roberta.encoder.layer.7"):
        below.get("encoder.layer.7", 3)


def test_a_missing_tensor_and_one_of_another_shape_are_named(tmp_path: Path) -> None:
    save_whole(tmp_path)
    weights = Weights.read(tmp_path)
    with pytest.raises(StartupError, match="lacks the tensor pooler.dense.weight"):
        weights.get("pooler.dense.weight", 3, 3)
    with pytest.raises(StartupError, match="another shape for the tensor embeddings.word"):
        weights.get("embeddings.word_embeddings.weight", 4, 4)


@pytest.mark.parametrize(
    "index", ["", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "gone.safetensors"}}']
)
def test_an_index_that_leads_nowhere_is_an_error(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StartupError, match="weights in .* cannot be loaded"):
        Weights.read(tmp_path)


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_whole(tmp_path)
    index = {"weight_map": dict.fromkeys(TENSORS, "../model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartupError, match="cannot be loaded"):
        Weights.read(folder)


def test_a_file_of_something_else_is_an_error(tmp_path: Path) -> None:
    torch.save([1, 2, 3], tmp_path / "pytorch_model.bin")
    with pytest.raises(StartupError, match="weights in .* cannot be loaded"):
        Weights.read(tmp_path)


@pytest.mark.parametrize("offsets", ["[0, 1e400]", "[-1e400, 4]", "[0, NaN]"])
def test_offsets_that_are_no_numbers_are_an_error(offsets: str, tmp_path: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": %b}}' % offsets.encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(StartupError, match="cannot be loaded"):
        Weights.read(tmp_path)


def test_a_tensor_that_is_larger_than_its_file_is_an_error(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(1000, 1000)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(StartupError, match="describes a in a way that cannot be"):
        Weights.read(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "size", "reason"),
    [
        ({"a": ([1], [0, 4])}, 5, "has 1 bytes that are of no tensor"),
        ({"a": ([1], [4, 8])}, 8, "describes a in a way that cannot be"),
        ({"a": ([1], [0, 4]), "b": ([1], [0, 4])}, 4, "describes b in a way that cannot be"),
        ({"a": ([-1, 2, -1], [0, 8])}, 8, "describes a in a way that cannot be"),
        ({"a": ([1], [0.0, 4])}, 4, "describes a in a way that cannot be"),
        ({"a": ([True], [0, 4])}, 4, "describes a in a way that cannot be"),
        ({"a": ([-1, -1], [0, 4])}, 4, "describes a in a way that cannot be"),
    ],
)
def test_each_byte_of_a_file_is_of_one_tensor(tensors, size: int, reason, tmp_path: Path) -> None:
    """As safetensors' own library demands."""
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": shape, "data_offsets": offsets}
            for name, (shape, offsets) in tensors.items()
        }
    ).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(size)
    with pytest.raises(SafetensorError):
        load(content)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(StartupError, match=reason):
        Weights.read(tmp_path)
