"""Parse the safetensors format without copies: a length, a JSON header, and the tensors' bytes."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from smart_embedder_client.errors import check_status, unexpected_answer

Array = npt.NDArray[Any]

MEDIA_TYPE = "application/vnd.safetensors"
# The key of the service's metadata in a file.
METADATA_KEY = "smart-embedder"
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
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


def check_media_type(response: httpx.Response) -> None:
    """Raise the error of a response whose status is not 200, or that is not safetensors."""
    check_status(response)
    media_type = response.headers.get("content-type", "of no type")
    if media_type != MEDIA_TYPE:
        raise unexpected_answer(response, f"the answer is {media_type} and not safetensors")


def read(content: bytes) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the tensors, as read-only views of `content`, and the service's metadata.

    bfloat16, which numpy lacks, becomes float32 with the same values. Raises one of `MALFORMED`
    unless each byte of the data belongs to exactly one tensor.
    """
    start, header = _read_header(content)
    metadata = json.loads(header.pop(_METADATA)[METADATA_KEY])
    if not isinstance(metadata, dict):
        raise TypeError("the metadata are no JSON object")
    data = np.frombuffer(content, np.uint8)[start:]
    if _data_size(header.values()) != len(data):
        raise ValueError(f"it has {len(data)} bytes of data, and its header says another number")
    return {name: _read_tensor(data, entry) for name, entry in header.items()}, metadata


def _read_header(content: bytes) -> tuple[int, dict[str, Any]]:
    """Return the start of the data, and the header's entries."""
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    if len(content) < max(start, _LENGTH_BYTES):
        raise ValueError(f"a header of {start} bytes in a file of {len(content)}")
    header = json.loads(content[_LENGTH_BYTES:start])
    if not isinstance(header, dict):
        raise TypeError("the header is no JSON object")
    return start, header


def _data_size(entries: Iterable[Mapping[str, Any]]) -> int:
    """Return the bytes of all tensors; raise `ValueError` if there are gaps or overlaps."""
    size = 0
    for begin, end in sorted(_check_integers(entry["data_offsets"]) for entry in entries):
        if begin != size or end < begin:
            raise ValueError(f"a tensor at {begin} to {end}, where {size} is expected")
        size = end
    return size


def _check_integers(numbers: Any) -> tuple[int, ...]:
    """Return a list of one or two integers as a tuple: offsets, or a shape."""
    if not isinstance(numbers, list) or len(numbers) not in (1, 2):
        raise TypeError(f"{numbers!r:.80} are no sizes")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError(f"{numbers!r:.80} are no sizes")
    return tuple(numbers)


def _read_tensor(data: npt.NDArray[np.uint8], entry: Mapping[str, Any]) -> Array:
    begin, end = _check_integers(entry["data_offsets"])
    shape, dtype = _check_integers(entry["shape"]), np.dtype(_TYPES[entry["dtype"]])
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{end - begin} bytes for the shape {shape}")
    tensor: Array = data[begin:end].view(dtype).reshape(shape)
    if entry["dtype"] == _BFLOAT16:
        tensor = (tensor.astype(np.uint32) << 16).view(np.float32)
        tensor.flags.writeable = False
    return tensor
