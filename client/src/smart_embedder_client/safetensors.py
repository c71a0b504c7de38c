"""The safetensors format, read without copies: a length, a JSON header, and the tensors' bytes."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from smart_embedder_client.errors import check_status, unexpected_answer
from smart_embedder_client.limits import Limits, load_json

Array = npt.NDArray[Any]

MEDIA_TYPE = "application/vnd.safetensors"
# The key of the service's own metadata in a file.
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
    """Raise the error of an answer whose status is not 200, or that is not safetensors."""
    check_status(response)
    media_type = response.headers.get("content-type", "of no type")
    if media_type != MEDIA_TYPE:
        raise unexpected_answer(response, f"the answer is {media_type} and not safetensors")


def read(content: bytes, limits: Limits) -> tuple[dict[str, Array], dict[str, Any]]:
    """The tensors, read-only views of `content`, and what the service says beside them.

    bfloat16, which numpy does not have, becomes float32 with the same values. Raises one of
    `MALFORMED` unless `content` is one file in which each byte of the data is of one tensor.
    """
    start, header = _header(content, limits)
    metadata = load_json(header.pop(_METADATA)[METADATA_KEY], limits)
    if not isinstance(metadata, dict):
        raise TypeError("the metadata are no JSON object")
    data = np.frombuffer(content, np.uint8)[start:]
    if _data_bytes(header.values()) != len(data):
        raise ValueError(f"it has {len(data)} bytes of data, and its header says another number")
    return {name: _tensor(data, about) for name, about in header.items()}, metadata


def _header(content: bytes, limits: Limits) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and what is said about the tensors."""
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    if len(content) < max(start, _LENGTH_BYTES):
        raise ValueError(f"a header of {start} bytes in a file of {len(content)}")
    header = load_json(content[_LENGTH_BYTES:start], limits)
    if not isinstance(header, dict):
        raise TypeError("the header is no JSON object")
    return start, header


def _data_bytes(tensors: Iterable[Mapping[str, Any]]) -> int:
    """The bytes of all tensors, which follow each other without gaps and share none."""
    end = 0
    for begin, after in sorted(_sizes(about["data_offsets"]) for about in tensors):
        if begin != end or after < begin:
            raise ValueError(f"a tensor at {begin} to {after}, where {end} is expected")
        end = after
    return end


def _sizes(numbers: Any) -> tuple[int, ...]:
    """A list of numbers of things, which are at most two."""
    if not isinstance(numbers, list) or len(numbers) not in (1, 2):
        raise TypeError(f"{numbers!r:.80} are no sizes")
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise TypeError(f"{numbers!r:.80} are no sizes")
    return tuple(numbers)


def _tensor(data: npt.NDArray[np.uint8], about: Mapping[str, Any]) -> Array:
    begin, end = _sizes(about["data_offsets"])
    shape, dtype = _sizes(about["shape"]), np.dtype(_TYPES[about["dtype"]])
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{end - begin} bytes for the shape {shape}")
    tensor: Array = data[begin:end].view(dtype).reshape(shape)
    if about["dtype"] == _BFLOAT16:
        tensor = (tensor.astype(np.uint32) << 16).view(np.float32)
        tensor.flags.writeable = False
    return tensor
