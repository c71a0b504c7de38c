"""Reading checkpoints: every format gives the same tensors, every fault its error."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from smart_embedder.errors import StartupError
from smart_embedder.models.files.weights import Weights, count_parameters

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
    """Save it in PyTorch's format from before version 1.6."""
    torch.save(TENSORS, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def save_shards(folder: Path) -> None:
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(TENSORS)}
    for file in set(files.values()):
        save_file({name: TENSORS[name] for name in TENSORS if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def save_old_names(folder: Path) -> None:
    """Save it with the names of checkpoints that were converted from TensorFlow."""
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
        for name, tensor in TENSORS.items()
    }
    torch.save(old, folder / "pytorch_model.bin")


@pytest.mark.parametrize("save", [save_whole, save_bin, save_old_bin, save_shards, save_old_names])
def test_every_checkpoint_format_gives_the_same_tensors(save, tmp_path: Path) -> None:
    save(tmp_path)
    weights = Weights.read(tmp_path)
    for name, tensor in TENSORS.items():
        assert torch.equal(weights.get(name, *tensor.shape), tensor)
    name, table = next(iter(TENSORS.items()))
    for index, expected in enumerate(table):
        assert torch.equal(weights.row(name, index), expected)
    with pytest.raises(StartupError, match="has no row 4 in the tensor"):
        weights.row(name, 4)
    assert torch.equal(weights.get(name, 4, 3, dtype=torch.bfloat16), table.bfloat16())
    described = weights.to(torch.device("meta"), torch.float16).get(name, 4, 3)
    assert described.is_meta
    assert (described.shape, described.dtype) == ((4, 3), torch.float16)
    assert count_parameters(tmp_path) == 12 + 3 + 3 + 6 + 3
    name, states = "encoder.layer.0.output.dense", torch.rand(5, 2)
    without_bias, layer = (weights.linear(name, 2, 3, bias=bias) for bias in (False, True))
    product = states @ TENSORS[f"{name}.weight"].T
    torch.testing.assert_close(without_bias(states), product)
    torch.testing.assert_close(layer(states), product + TENSORS[f"{name}.bias"])
    layer = weights.to(torch.device("cpu"), torch.bfloat16).linear(name, 2, 3)
    assert (layer.weight.dtype, layer.bias.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("archive", [True, False])
def test_shared_and_strided_tensors_are_read(tmp_path: Path, archive: bool) -> None:
    whole = torch.arange(60.0).view(3, 4, 5)
    tensors = {"t": whole.mT, "part": whole[1:, 1:, 1:], "row": whole[2], "step": whole[..., ::2]}
    tensors |= {"learned": torch.nn.Parameter(whole[0]), "number": whole.sum()}
    tensors |= {"empty": torch.empty(0, 3)}
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=archive)
    weights = Weights.read(tmp_path)
    for name, expected in tensors.items():
        assert torch.equal(weights.get(name, *expected.shape), expected)
    if archive:
        save_file({"empty": tensors["empty"]}, tmp_path / "model.safetensors")
        assert Weights.read(tmp_path).get("empty", 0, 3).shape == (0, 3)


HEAD = {"weight": torch.rand(4, 3), "bias": torch.rand(4)}


@pytest.mark.parametrize(
    ("state", "sizes", "message"),
    [
        (HEAD, (3, 4), None),
        (HEAD, (2, None), r"tensor head.weight: \[4, 3\], and its configuration says \[any, 2\]"),
        (HEAD | {"bias": torch.zeros(3)}, (3, 4), r"tensor head.bias: \[3\], .* says \[4\]"),
        ({"weight": torch.ones(4, 3)}, (3, 4), "lacks the tensor head.bias"),
        (None, (3, 4), "head.pt cannot be loaded: .*No such file"),
        (b"PK\x03\x04" + bytes(200), (3, 4), "head.pt cannot be loaded"),
    ],
)
def test_linear_head_is_read_from_its_own_file(tmp_path: Path, state, sizes, message) -> None:
    path = tmp_path / "head.pt"
    if isinstance(state, bytes):
        path.write_bytes(state)
    elif state is not None:
        torch.save(state, path)
    if message is None:
        head = Weights.read_head(path).linear("head", *sizes)
        assert torch.equal(head.weight, state["weight"])
        assert torch.equal(head.bias, state["bias"])
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        message = "head.pt cannot be loaded"
    with pytest.raises(StartupError, match=message):
        Weights.read_head(path).linear("head", *sizes)


def safetensors_file(size: int, header: str = "", **tensors: tuple[list, list]) -> bytes:
    """A file of that header, or of one with shapes and offsets of tensors, and `size` bytes."""
    entries = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        for name, (shape, offsets) in tensors.items()
    }
    encoded = (header or json.dumps(entries)).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(size)


INVALID = "has an invalid shape or offset for its tensor {}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ((100_000_001).to_bytes(8, "little"), "model.safetensors is not a safetensors file"),
        ((100_000_000).to_bytes(8, "little"), "model.safetensors is cut short"),
        (bytes(7), "model.safetensors is cut short"),
        (
            safetensors_file(4, '{"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}'),
            "has a in F4, which is not supported",
        ),
        (safetensors_file(4, a=([2], [0, 8])), "ends before its tensor a does"),
        (safetensors_file(5, a=([1], [0, 4])), "has 1 bytes that are of no tensor"),
        (safetensors_file(8, a=([1], [4, 8])), INVALID.format("a")),
        (safetensors_file(4, a=([1], [0, 4]), b=([1], [0, 4])), INVALID.format("b")),
        (safetensors_file(8, a=([-1, 2, -1], [0, 8])), INVALID.format("a")),
        (safetensors_file(4, a=([1], [0.0, 4])), INVALID.format("a")),
        (safetensors_file(4, a=([1], [0, math.inf])), ""),
    ],
)
def test_damaged_safetensors_files_are_refused(tmp_path, content, reason) -> None:
    """The safetensors library refuses these files, too."""
    with pytest.raises(SafetensorError):
        load(content)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(StartupError, match=f"the weights in .* cannot be loaded: .*{reason}"):
        Weights.read(tmp_path)
    assert count_parameters(tmp_path) == 0


class Payload:
    """An object that runs code when it is unpickled."""

    def __reduce__(self):
        return (print, ("arbitrary code ran",))


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (None, "there is no model.safetensors and no pytorch_model.bin"),
        ([1, 2, 3], ""),
        ({"a": torch.zeros(1).expand(1000, 1000)}, INVALID.format("a")),
        ({"embeddings.word_embeddings.weight": Payload()}, ""),
    ],
)
def test_damaged_pytorch_files_are_refused(tmp_path, state, reason, archive, capsys) -> None:
    if state is not None:
        path = tmp_path / "pytorch_model.bin"
        torch.save(state, path, _use_new_zipfile_serialization=archive)
    with pytest.raises(StartupError, match=f"the weights in .* cannot be loaded: .*{reason}"):
        Weights.read(tmp_path)
    assert "arbitrary code ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("pooler.dense.weight", (3, 3), "lacks the tensor roberta.pooler.dense.weight"),
        ("embeddings.word_embeddings.weight", (4, 4), "another shape for the tensor roberta.embed"),
        *(
            (name, (3, 2), f"the tensor roberta.{name} in {name}; take one in float32, float16 or")
            for name in ("int8", "float8_e4m3fn")  # Quantized, without their scales.
        ),
    ],
)
def test_tensor_is_found_behind_a_prefix_or_named(tmp_path, name, shape, message) -> None:
    quantized = {
        dtype: torch.ones(3, 2).to(getattr(torch, dtype)) for dtype in ("int8", "float8_e4m3fn")
    }
    tensors = {f"roberta.{name}": tensor for name, tensor in (TENSORS | quantized).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = Weights.read(tmp_path)
    assert "roberta.encoder.layer.0.output.dense.bias" in weights
    below = weights.with_prefix_of("embeddings.word_embeddings.weight")
    assert "encoder.layer.0.output.dense.bias" in below
    with pytest.raises(StartupError, match=message):
        below.get(name, *shape)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"is quantized by gptq \(quantization_config in config.json\)",
        ),
        ({"quantization_config": "own"}, "is quantized by own"),
        ({"transformers_weights": "b.safetensors"}, r"file of weights \(transform"),
    ],
)
def test_quantized_weights_are_refused(content, message, tmp_path: Path) -> None:
    save_whole(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    assert len(Weights.read(tmp_path).tensors) == len(TENSORS)
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(StartupError, match=message):
        Weights.read(tmp_path)


@pytest.mark.parametrize(
    ("others", "prefix"),
    [
        ({"bert.": 1.0}, "bert."),
        ({"a.": 0.0, "": 1.0, "b_": 0.0}, ""),
        ({"my.wrapper.": 1.0, "my.wrapper.of_": 0.0}, "my.wrapper."),
        ({"a.": 0.0, "b.": 0.0}, None),
        ({"": 0.0, "model.": 0.0}, None),
    ],
)
def test_prefix_is_found_among_tensors_of_several_models(others, prefix, tmp_path: Path) -> None:
    name = "embeddings.word_embeddings.weight"
    tensors = {prefix + name: torch.full((2, 2), value) for prefix, value in others.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = Weights.read(tmp_path)
    if prefix is None:
        with pytest.raises(StartupError, match=f"has several tensors {name}, and nothing says"):
            weights.with_prefix_of(name)
    else:
        below = weights.with_prefix_of(name)
        assert (below.prefix, below.get(name, 2, 2).min()) == (prefix, 1.0)


@pytest.mark.parametrize(
    "index",
    ['{"weight_map": 3}', '{"weight_map": {"a": "gone.safetensors"}}',
     '{"weight_map": {"a": "../model.safetensors"}}'],
)  # fmt: skip
def test_index_of_shards_reads_only_its_own_folder(index: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_whole(tmp_path)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StartupError, match="weights in .* cannot be loaded"):
        Weights.read(folder)
