"""The tensors of a checkpoint by name: safetensors or PyTorch's files, whole or in shards.

They stay mapped from their files: a tensor that is not copied takes only the system's cache.
"""

import json
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from app.errors import StartupError
from app.models.checkpoint.heap import trim_heap
from app.models.checkpoint.mapped_files import give_back_pages

_FILE_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    RuntimeError,
    pickle.UnpicklingError,
    SafetensorError,
)
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of the checkpoint in `folder`; names in methods do not include `prefix`.

    `files` are the files that they are mapped from.
    """

    folder: Path
    tensors: Mapping[str, Tensor]
    prefix: str = ""
    files: Sequence[Path] = ()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Map all tensors; raise `StartupError` for files that are absent or damaged."""
        try:
            return cls(folder, _read_tensors(folder), files=weight_files(folder))
        except (*_FILE_ERRORS, AttributeError) as error:
            raise StartupError(f"the weights in {folder} cannot be loaded: {error}") from error

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def before(self, name: str) -> Self:
        """The same tensors with the prefix that `name` has in this checkpoint."""
        found = (known.removesuffix(name) for known in self.tensors if known.endswith(name))
        return replace(self, prefix=next(found, self.prefix))

    def get(self, name: str, *shape: int) -> Tensor:
        """The tensor, of that shape.

        Raises `StartupError` where it is missing, another's, or not in a known dtype.
        """
        full_name = self.prefix + name
        tensor = self.tensors.get(full_name)
        # A random tensor in its place would make random results.
        if tensor is None:
            raise StartupError(f"the checkpoint in {self.folder} lacks the tensor {full_name}")
        if tensor.shape != shape:
            raise StartupError(
                f"the checkpoint in {self.folder} has another shape for the tensor {full_name}"
            )
        # Other dtypes are those of quantized weights, which mean nothing without their scales.
        if tensor.dtype not in _DTYPES:
            raise StartupError(
                f"the checkpoint in {self.folder} has the tensor {full_name} in "
                f"{str(tensor.dtype).removeprefix('torch.')}; take one in float32, float16 or "
                "bfloat16"
            )
        return tensor

    def give_back_pages(self) -> None:
        """Release the pages of the files, so that copied weights are not in memory twice.

        Also returns freed copies that the allocator keeps, which can be a tenth of a model.
        """
        give_back_pages(self.files)
        trim_heap()

    def linear(
        self, name: str, in_features: int, out_features: int, *, bias: bool = True
    ) -> nn.Linear:
        """The linear layer of that name."""
        weight = self.get(f"{name}.weight", out_features, in_features)
        return linear_of(weight, self.get(f"{name}.bias", out_features) if bias else None)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in weight_files(folder):
        for name, tensor in _read_file(path).items():
            if isinstance(tensor, Tensor):
                tensors[_modern(name)] = tensor
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files with the tensors; raises `OSError`, `ValueError` or `KeyError` without any."""
    for name in _FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / Path(shard).name for shard in sorted(set(shards))]
    raise FileNotFoundError(f"there is no {' and no '.join(_FILES)}")


def count_parameters(folder: Path) -> int:
    """The number of parameters of a checkpoint, from tensors that are mapped and not read.

    0 if they cannot be mapped: loading raises the error.
    """
    with suppress(*_FILE_ERRORS):
        tensors = (each for path in weight_files(folder) for each in _read_file(path).values())
        return sum(each.numel() for each in tensors if isinstance(each, Tensor))
    return 0


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    # Only archives can be mapped, which files from before PyTorch 1.6 are not.
    mapped = zipfile.is_zipfile(path)
    state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    return state


def _modern(name: str) -> str:
    """The name of a norm's parameter that has another one in checkpoints from TensorFlow."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


def read_linear(path: Path, in_features: int, out_features: int | None = None) -> nn.Linear:
    """A linear head from a state dict with `weight` `[out, in]` and `bias` `[out]`.

    Raises `StartupError` where the file is missing, damaged, or of another shape.
    """
    if not path.is_file():
        raise StartupError(f"the head {path.name} is missing in {path.parent}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        weight, bias = state["weight"], state["bias"]
    except (*_FILE_ERRORS, TypeError) as error:
        raise StartupError(f"the head {path} is damaged: {_first_line(error)}") from error
    if out_features is None:
        out_features = weight.shape[0]
    if weight.shape != (out_features, in_features) or bias.shape != (out_features,):
        raise StartupError(
            f"the head {path} has the wrong shape: weight {list(weight.shape)} and bias "
            f"{list(bias.shape)}, but [{out_features}, {in_features}] and [{out_features}] fit"
        )
    return linear_of(weight, bias)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with these tensors, which are not copied."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    linear.load_state_dict(parameters, assign=True)
    return linear


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
