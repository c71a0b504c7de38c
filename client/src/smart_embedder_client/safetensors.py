"""The safetensors format, read without copies: a length, a JSON header, and the tensors' bytes."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MEDIA_TYPE = "application/vnd.safetensors"
# The key of the service's own metadata in a file.
METADATA_KEY = "smart-embedder"
_LENGTH_BYTES = 8
# The format allows no larger one.
_MOST_HEADER_BYTES = 100_000_000
_BFLOAT16 = "BF16"
_TYPES: Mapping[str, str] = {
    "F32": "<f4",
    "F16": "<f2",
    _BFLOAT16: "<u2",
    "I8": "i1",
    "U8": "u1",
    "I64": "<i8",
    "U32": "<u4",
}


def read(content: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors, read-only views of `content`, and the metadata.

    bfloat16, which numpy does not have, becomes float32 with the same values.

    Raises:
        ValueError: `content` has another format.
        KeyError: The same, or the service does not use a tensor's type.
    """
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    header = json.loads(content[_LENGTH_BYTES:start])
    metadata = header.pop("__metadata__", {})
    data = np.frombuffer(content, np.uint8)[start:]
    return {name: _tensor(data, about) for name, about in header.items()}, metadata


def _tensor(data: npt.NDArray[np.uint8], about: Mapping[str, Any]) -> Array:
    begin, end = about["data_offsets"]
    tensor: Array = data[begin:end].view(_TYPES[about["dtype"]]).reshape(about["shape"])
    if about["dtype"] == _BFLOAT16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor


def size_of(begin: bytes | bytearray) -> int | None:
    """The size of the file that begins with these bytes; None if they are too few to tell.

    Raises:
        ValueError: It has another format.
    """
    start = _LENGTH_BYTES + int.from_bytes(begin[:_LENGTH_BYTES], "little")
    if len(begin) < _LENGTH_BYTES:
        return None
    if start > _MOST_HEADER_BYTES:
        raise ValueError(f"a header of {start} bytes")
    if len(begin) < start:
        return None
    header = json.loads(begin[_LENGTH_BYTES:start])
    header.pop("__metadata__", None)
    return start + max((about["data_offsets"][1] for about in header.values()), default=0)
