"""Reads the tensors of a checkpoint by name, from safetensors or PyTorch files, also in shards.

Opening a checkpoint reads only the descriptions of its tensors. `Weights.get` reads a tensor into
memory of its own; see `smart_embedder.models.files.reading`.
"""

import json
import math
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from smart_embedder.errors import StartupError
from smart_embedder.kernels.backend import make_linear, parameter_dict
from smart_embedder.models.files.adapters import CONFIG_FILE, WEIGHT_FILES, LowRank, add_adapter
from smart_embedder.models.files.config import read_optional, transformer_folder
from smart_embedder.models.files.digest import TensorDigest, copy_in_this_thread
from smart_embedder.models.files.reading import AT_ONCE, ModelFile, read_file
from smart_embedder.models.files.record import ReadRecord, current_record

_FILE_ERRORS = (
    OSError, EOFError, ValueError, LookupError, OverflowError, TypeError, AttributeError,
    RuntimeError, pickle.UnpicklingError,
)  # fmt: skip
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_FILES = ("model.safetensors", "pytorch_model.bin")
# By their names in safetensors. Types that are not in `_DTYPES` are only named in errors.
_STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
# The prefixes of transformers for the tensors of a model with a head.
_PREFIXES = ("", "bert.", "roberta.", "model.", "distilbert.", "mpnet.")
_CPU = torch.device("cpu")
# The bytes of the header's length, at the beginning of a safetensors file.
_BYTES_OF_LENGTH = 8
_LONGEST_HEADER = 100_000_000  # The limit of the safetensors library.
# The most threads that read one tensor. More gain little: the memory is the limit.
_THREADS = 4
# Bytes that are read before they are rounded: they fit the cache of a core.
_ROUNDED_AT_ONCE = 2**20


@dataclass(frozen=True, slots=True)
class _ReadFile:
    """A tensor in memory, in place of a file that does not hold its bytes in order."""

    path: Path
    tensor: Tensor

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill the buffer from the byte `start` on."""
        content = memoryview(self.tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        buffer[:] = content[start : start + len(buffer)]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, from the byte `start` on, where it has this `name`.

    When it is read, that is recorded in `record`, with its digest if it has a name to be
    `hashed_as`. The product `added` by an adapter is part of what is read.
    """

    file: ModelFile | _ReadFile
    start: int
    shape: torch.Size
    dtype: torch.dtype
    name: str = ""
    record: ReadRecord | None = None
    hashed_as: str | None = None
    added: LowRank | None = None

    def __getitem__(self, index: Any) -> Tensor:
        """Index it like a tensor, as transformers does; `...` reads all of it."""
        return self.read(self.dtype)[index]

    def read(self, dtype: torch.dtype) -> Tensor:
        """Read the tensor, and round it to `dtype` part by part: it is never in memory twice."""
        if self.added is not None:
            return self._read_sum(self.added, dtype)
        tensor = torch.empty(self.shape, dtype=dtype)
        rounds, flat = dtype is not self.dtype, tensor.view(-1)
        at_once = (_ROUNDED_AT_ONCE if rounds else AT_ONCE) // self.dtype.itemsize
        parts = range(0, len(flat), at_once)
        digest = None if self.hashed_as is None else TensorDigest(self.shape)

        def read_every(step: int, number: int) -> None:
            """Read every `step`-th part, beginning with part `number`."""
            exact = torch.empty(min(len(flat), at_once) if rounds else 0, dtype=self.dtype)
            for first in parts[number::step]:
                part = flat[first : first + at_once]
                stored = exact[: len(part)] if rounds else part
                content = memoryview(stored.view(torch.uint8).numpy())  # type: ignore[arg-type]
                self.file.read_into(content, self.start + first * self.dtype.itemsize)
                with torch.inference_mode(tensor.is_inference()):
                    if digest is not None:
                        digest.add(first, stored)
                    if rounds:
                        copy_in_this_thread(part, stored)

        # One thread copies less than the memory's bandwidth allows.
        threads = max(1, min(_THREADS, torch.get_num_threads(), len(parts)))
        if threads == 1:
            read_every(1, 0)
        else:
            with ThreadPoolExecutor(threads, "read-tensor") as pool:
                list(pool.map(partial(read_every, threads), range(threads)))
        if self.record is not None:
            self.record.read_tensor(self.file.path, self.name)
            if self.hashed_as is not None and digest is not None:
                folder = self.file.path.parent
                self.record.add_digest(folder, self.hashed_as, digest.finish())
        return tensor

    def read_exactly(self) -> Tensor:
        """Read the tensor in float32."""
        return self.read(torch.float32)

    def _read_sum(self, added: LowRank, dtype: torch.dtype) -> Tensor:
        """Read the sum of the tensor and the product of an adapter, rounded to `dtype`."""
        exact = replace(self, added=None, hashed_as=None).read_exactly()
        with torch.inference_mode(exact.is_inference()):
            exact += added.compute()
        in_memory = _ReadFile(self.file.path, exact)
        whole = replace(self, file=in_memory, start=0, dtype=exact.dtype, added=None)
        return whole.read(dtype)


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of the checkpoint in `folder`; names in methods do not include `prefix`.

    Tensors are read to `device` and rounded to `dtype`, by default that of the file. With `kept`,
    a tensor is read only once.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    prefix: str = ""
    device: torch.device = _CPU
    dtype: torch.dtype | None = None
    kept: dict[tuple[str, torch.dtype], Tensor] | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Find all tensors; raises `StartupError` for missing or damaged files.

        It is also raised if transformers would compute with other weights than these tensors.
        """
        _require_supported(folder)
        with _explain_damage(folder):
            tensors = _find_tensors(folder, _FILES)
            if (folder / CONFIG_FILE).is_file():
                adapter = cls(folder, _find_tensors(folder, WEIGHT_FILES))
                adapter.require_numbers()
                tensors = add_adapter(folder, tensors, adapter.tensors)
        return cls(folder, tensors)

    @classmethod
    def read_head(cls, path: Path) -> Self:
        """Find the tensors of a head in a file of its own, with its name before theirs."""
        with _explain_damage(path):
            tensors = {f"{path.stem}.{name}": stored for name, stored in _list_tensors(path)}
        return cls(path.parent, tensors)

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def with_prefix_of(self, name: str) -> Self:
        """Return the same tensors, with the prefix that stands before `name` in the checkpoint.

        Tensors of heads have no prefix. A file may hold tensors of several models: the prefixes of
        transformers are preferred. Raises `StartupError` if several remain.
        """
        matches = (tensor for tensor in self.tensors if f".{tensor}".endswith(f".{name}"))
        found = [match.removesuffix(name) for match in matches]
        found = [prefix for prefix in found if prefix in _PREFIXES] or found
        if len(found) > 1:
            raise StartupError(
                f"the checkpoint in {self.folder} has several tensors {name}, and nothing says "
                f"which is the model's: {found[0]}{name}, {found[1]}{name}"
            )
        return replace(self, prefix=found[0] if found else self.prefix)

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the same tensors, to be read to a device in a number format.

        On the device `meta` only shapes are compared, and none is read.
        """
        return replace(self, device=device, dtype=dtype)

    def caching(self) -> Self:
        """Return the same tensors; the new object keeps each once it is read."""
        return replace(self, kept={})

    def get(self, name: str, *shape: int | None, dtype: torch.dtype | None = None) -> Tensor:
        """Read the tensor of that shape into memory of its own, in `dtype` if that is given.

        None stands for any size. Raises `StartupError` if the tensor is missing, has another shape
        or an unsupported dtype, or if its file ends too early.
        """
        stored = self._find(name, *shape)
        dtype = dtype or self.dtype or stored.dtype
        if self.device.type == "meta":
            return torch.empty(stored.shape, dtype=dtype, device=self.device)
        tensor = None if self.kept is None else self.kept.get((name, dtype))
        if tensor is None:
            tensor = stored.read(dtype).to(self.device)
            if self.kept is not None:
                self.kept[name, dtype] = tensor
        return tensor

    def row(self, name: str, index: int) -> Tensor:
        """Read one row of a matrix in float32; the others are not read."""
        stored = self._find(name, None, None)
        rows, width = stored.shape
        if index >= rows:
            raise StartupError(
                f"the checkpoint in {self.folder} has no row {index} in the tensor {name}"
            )
        if stored.added is not None:
            return stored.read(stored.dtype)[index].float()
        start = stored.start + index * width * stored.dtype.itemsize
        row = replace(stored, start=start, shape=stored.shape[1:], hashed_as=f"{name}[{index}]")
        return row.read_exactly()

    def integers(self, name: str) -> Tensor:
        """Read a tensor of integers, as it is in the file."""
        stored = replace(self.tensors[self.prefix + name], hashed_as=name)
        if stored.dtype.is_floating_point or len(stored.shape) != 1:
            raise StartupError(f"the checkpoint in {self.folder} has no integers in {name}")
        return stored.read(stored.dtype).long()

    def linear(
        self, name: str, in_features: int | None, out_features: int | None, *, bias: bool = True
    ) -> nn.Linear:
        """Read the linear layer of that name; None stands for any size."""
        weight = self.get(f"{name}.weight", out_features, in_features)
        return make_linear(weight, self.get(f"{name}.bias", len(weight)) if bias else None)

    def norm(self, name: str, width: int, epsilon: float) -> nn.LayerNorm:
        """Read the layer norm of that name, with a bias if there is one."""
        bias = self.get(f"{name}.bias", width) if f"{name}.bias" in self else None
        norm = nn.LayerNorm(width, epsilon, bias=bias is not None, device="meta")
        weight = self.get(f"{name}.weight", width)
        norm.load_state_dict(parameter_dict(weight, bias), assign=True)
        return norm

    def _find(self, name: str, *shape: int | None) -> StoredTensor:
        full_name = self.prefix + name
        tensor = self.tensors.get(full_name)
        # A random tensor instead would compute random results.
        if tensor is None:
            raise StartupError(f"the checkpoint in {self.folder} lacks the tensor {full_name}")
        fits = len(tensor.shape) == len(shape) and all(
            expected in {None, found} for found, expected in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            raise StartupError(
                f"the checkpoint in {self.folder} has another shape for the tensor {full_name}: "
                f"{[*tensor.shape]}, and its configuration says "
                f"{str([*shape]).replace('None', 'any')}"
            )
        self._require_numbers(full_name)
        return replace(tensor, hashed_as=name)

    def require_numbers(self) -> None:
        """Raise `StartupError` if the weight of any layer has an unsupported dtype."""
        for full_name in self.tensors:
            if full_name.endswith(".weight"):
                self._require_numbers(full_name)

    def _require_numbers(self, full_name: str) -> None:
        # Other dtypes are those of quantized weights, whose scales are not read.
        dtype = self.tensors[full_name].dtype
        if dtype not in _DTYPES:
            raise StartupError(
                f"the checkpoint in {self.folder} has the tensor {full_name} in "
                f"{str(dtype).removeprefix('torch.')}; take one in float32, float16 or bfloat16"
            )


def _require_supported(folder: Path) -> None:
    """Raise `StartupError` for quantized weights, and weights under another name."""
    config = read_optional(folder / "config.json")
    quantization = config.get("quantization_config")
    if quantization:
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise StartupError(
            f"{folder} is quantized by {kind!s:.60} (quantization_config in config.json), which is "
            "not supported: take one in float32, float16 or bfloat16"
        )
    if config.get("transformers_weights"):
        raise StartupError(
            f"{folder / 'config.json'} names a file of weights (transformers_weights), which is "
            f"not supported: rename the file to {_FILES[0]}"
        )


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Raise `StartupError` for missing and damaged files within the block."""
    try:
        yield
    except _FILE_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise StartupError(f"the weights in {path} cannot be loaded: {reason}") from error


def _find_tensors(folder: Path, files: Iterable[str]) -> dict[str, StoredTensor]:
    """Find the tensors of the first of these files that exists, or of its shards."""
    tensors: dict[str, StoredTensor] = {}
    for path in _find_weight_files(folder, files):
        for stored_name, tensor in _list_tensors(path):
            # Checkpoints from TensorFlow have other names for the parameters of norms.
            name = stored_name.replace("LayerNorm.gamma", "LayerNorm.weight")
            tensors[name.replace("LayerNorm.beta", "LayerNorm.bias")] = tensor
    return tensors


def _find_weight_files(folder: Path, names: Iterable[str]) -> list[Path]:
    for name in names:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            shards = json.loads(read_file(index))["weight_map"].values()
            return [folder / Path(shard).name for shard in sorted(set(shards))]
    raise FileNotFoundError(f"there is no {' and no '.join(names)}")


def count_parameters(folder: Path) -> int:
    """Count the parameters without reading them; 0 for a folder that cannot be loaded."""
    with suppress(StartupError):
        return sum(
            math.prod(tensor.shape)
            for tensor in Weights.read(transformer_folder(folder)).tensors.values()
        )
    return 0


def _list_tensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a file by name, and record that they were found."""
    list_file = _list_safetensors if path.suffix == ".safetensors" else _list_pytorch_file
    record = current_record()
    for name, tensor in list_file(path):
        if record is not None:
            record.find_tensor(path, name, tensor.shape)
        yield name, replace(tensor, name=name, record=record)


def _list_safetensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors that the header describes; raises `ValueError` if it is invalid."""
    file = ModelFile(path)
    length = int.from_bytes(file.read(0, _BYTES_OF_LENGTH), "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"{path.name} is not a safetensors file")
    header = json.loads(file.read(_BYTES_OF_LENGTH, length))
    content = end_of_last = _BYTES_OF_LENGTH + length
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    # The format demands that each byte belongs to one tensor.
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = _STORED_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{path.name} has {name} in {entry['dtype']}, which is not supported")
        numbers = (*entry["shape"], *entry["data_offsets"])
        is_whole = all(type(number) is int for number in numbers)
        shape = torch.Size(entry["shape"])
        start, end = (content + offset for offset in entry["data_offsets"])
        size = math.prod(shape) * dtype.itemsize
        if not is_whole or min(shape, default=0) < 0 or (start, end - start) != (end_of_last, size):
            raise ValueError(f"{path.name} has an invalid shape or offset for its tensor {name}")
        if end > file.size:
            raise ValueError(f"{path.name} ends before its tensor {name} does")
        end_of_last = end
        yield name, StoredTensor(file, start, shape, dtype)
    if end_of_last != file.size:
        raise ValueError(f"{path.name} has {file.size - end_of_last} bytes that are of no tensor")


def _list_pytorch_file(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a state dict."""
    file = ModelFile(path)
    # The tensors of a file from before PyTorch 1.6 can only be read at once.
    device = "meta" if zipfile.is_zipfile(file.opened) else "cpu"
    file.opened.seek(0)
    for name, tensor in torch.load(file.opened, map_location=device, weights_only=True).items():
        if isinstance(tensor, Tensor):
            yield name, _locate_tensor(name, file, tensor)


def _locate_tensor(name: str, file: ModelFile, tensor: Tensor) -> StoredTensor:
    """Locate a tensor: on the device `meta` it lies in its file, otherwise in memory."""
    # A stride of 0 would repeat a row any number of times.
    if not tensor.is_contiguous() and tensor.nbytes > file.size:
        raise ValueError(f"{file.path.name} has an invalid shape or offset for its tensor {name}")
    if not tensor.is_meta:
        in_memory = _ReadFile(file.path, tensor.contiguous())
        return StoredTensor(in_memory, 0, tensor.shape, tensor.dtype)
    stored_at = tensor.untyped_storage()._checkpoint_offset or 0  # noqa: SLF001 - see torch.load
    start = stored_at + int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        return StoredTensor(file, start, tensor.shape, tensor.dtype)
    # Read the region that holds a tensor with gaps, and copy the tensor out of it.
    last = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    region = StoredTensor(file, start, torch.Size([last + 1]), tensor.dtype)
    return _locate_tensor(name, file, region[...].as_strided(tensor.shape, tensor.stride()))
