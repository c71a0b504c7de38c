"""Fuzzes safetensors: checkpoints, and responses that the client reads."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from smart_embedder_client import safetensors as client_format
from smart_embedder_client.errors import MALFORMED

from smart_embedder.errors import StartupError
from smart_embedder.models.files.weights import Weights, count_parameters
from tests.fuzzing.inputs import Target, check_sentence, linear, outcome, read_input, seeds_of


def file_of(tensors: dict[str, torch.Tensor], members: object = None) -> bytes:
    """Write a file with the safetensors package, with metadata as the service's."""
    metadata = None if members is None else {client_format.METADATA_KEY: json.dumps(members)}
    return safetensors.torch.save(tensors, metadata)


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "dense.weight": torch.arange(6.0).view(2, 3),
        "LayerNorm.gamma": torch.ones(3, dtype=torch.bfloat16),
        "half": torch.rand(2).half(),
        "bytes": torch.ones(3, 1, dtype=torch.int8),
        "none": torch.empty(0, 5),
        "one": torch.tensor(1.5, dtype=torch.float64),
    }


def read_plainly(content: bytes) -> dict[str, torch.Tensor] | None:
    """Read a file with the safetensors package; None if it refuses."""
    tensors, _ = outcome(
        lambda: safetensors.torch.load(content), SafetensorError, KeyError, ValueError, RuntimeError
    )
    return tensors


def checkpoint_seeds() -> Iterator[bytes]:
    whole = file_of(_tensors())
    overlapping = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    text = json.dumps(overlapping).encode()
    return seeds_of(
        [whole, whole[:-1], whole + b"\0", len(text).to_bytes(8, "little") + text + bytes(4)]
    )


def check_checkpoint(data: bytes) -> None:
    """Compare the tensors with those of the package; it refuses the same files."""
    with TemporaryDirectory() as folder:
        _check_checkpoint(Path(folder), read_input(data)[1])


def _check_checkpoint(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with linear(content, calls_per_byte=60):
        weights, refused = outcome(lambda: Weights.read(folder), StartupError)
    expected = read_plainly(content)
    if refused is not None:
        check_sentence(refused)
        assert count_parameters(folder) == 0
        assert expected is None or _has_unknown_type(content), refused
        return
    assert expected is not None, "the package refuses it"
    assert len(weights.tensors) == len({_modern(name) for name in expected})
    for name, tensor in expected.items():
        found, refused = outcome(lambda: weights.get(_modern(name), *tensor.shape), StartupError)  # noqa: B023
        if refused is not None:
            check_sentence(refused)
            assert not tensor.is_floating_point() or tensor.dtype.itemsize == 1, refused
            continue
        assert found.dtype is tensor.dtype
        if list(map(_modern, expected)).count(_modern(name)) == 1:
            assert _bytes(found) == _bytes(tensor)


def _modern(name: str) -> str:
    gamma, beta = "LayerNorm.gamma", "LayerNorm.beta"
    return name.replace(gamma, "LayerNorm.weight").replace(beta, "LayerNorm.bias")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _has_unknown_type(content: bytes) -> bool:
    known = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}
    known |= {"F8_E4M3", "F8_E5M2"}
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return any(entry["dtype"] not in known for name, entry in header.items() if name[:2] != "__")


def answer_seeds() -> Iterator[bytes]:
    """Yield responses like those of the service."""
    members = {"output_dtype": "float32"}
    unit = torch.tensor([[0.6, 0.8], [1.0, 0.0]])
    tensors = {
        "dense": unit,
        "sparse_offsets": torch.tensor([0, 1, 1]),
        "sparse_indices": torch.tensor([5], dtype=torch.uint32),
        "sparse_values": torch.tensor([0.5]),
        "colbert_offsets": torch.tensor([0, 2, 3]),
        "colbert": torch.cat([unit, unit[:1]]),
    }
    half = {
        name: tensor.bfloat16() if tensor.dtype is torch.float32 else tensor
        for name, tensor in tensors.items()
    }
    contents = [
        file_of(tensors, members),
        file_of(half, members | {"output_dtype": "bfloat16"}),
    ]
    return seeds_of([*contents, file_of(_tensors(), members)])


def check_answer(data: bytes) -> None:
    """Compare the arrays of the Python client with those of the package."""
    _, content = read_input(data)
    with linear(content, calls_per_byte=60):
        read, refused = outcome(lambda: client_format.read(content), *MALFORMED)
    if refused is None:
        expected = read_plainly(content)
        assert expected is not None, "the package refuses it"
        assert read[0].keys() == expected.keys()
        for name, array in read[0].items():
            _check_array(array, expected[name])


def _check_array(array: np.ndarray, tensor: torch.Tensor) -> None:
    assert not array.flags.writeable
    tensor = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    assert array.shape == tuple(tensor.shape)
    assert array.tobytes() == _bytes(tensor)


TARGETS = {
    "checkpoints": Target(checkpoint_seeds, check_checkpoint),
    "answers": Target(answer_seeds, check_answer),
}
