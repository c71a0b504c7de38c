"""Read the vectors of responses into arrays, as a client does."""

import json
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load

from app.answers import METADATA_KEY
from smart_embedder.results import FloatArray, SparseVector, TextEmbedding

SIGNS = ("binary", "ubinary")


def restore_numbers(
    numbers: npt.NDArray[Any], dtype: str, width: int | None = None
) -> npt.NDArray[np.float32]:
    """Restore float32: bfloat16 has its upper 16 bits; packed signs become 1 and -1."""
    if dtype == "bfloat16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    bits = numbers.astype(np.int16) + (128 if dtype == "binary" else 0)
    return np.unpackbits(bits.astype(np.uint8), axis=-1, count=width) * np.float32(2) - 1


def read_embedding(vectors: dict[str, Any]) -> TextEmbedding:
    """Read `embeddings` of one text in a native JSON response; null is no vector."""

    def array(numbers: Any) -> FloatArray | None:
        return None if numbers is None else np.asarray(numbers, np.float32)

    if sparse := vectors["sparse"]:
        indices, values = sparse["indices"], sparse["values"]
        sparse = SparseVector(np.asarray(indices, np.int64), np.asarray(values, np.float32))
    return TextEmbedding(array(vectors["dense"]), sparse, array(vectors["colbert"]))


def read_safetensors(file: bytes) -> tuple[list[TextEmbedding], dict[str, Any]]:
    """Read the vectors of each text, and the report in the metadata, of a safetensors response."""
    tensors = load(file)
    length = int.from_bytes(file[:8], "little")
    report = json.loads(json.loads(file[8 : 8 + length])["__metadata__"][METADATA_KEY])
    sparse: list[Any] = []
    if (offsets := tensors.get("sparse_offsets")) is not None:
        indices, values = tensors["sparse_indices"].astype(np.int64), tensors["sparse_values"]
        parts = (np.split(numbers, offsets[1:-1]) for numbers in (indices, values))
        sparse = [SparseVector(*pair) for pair in zip(*parts, strict=True)]
    colbert: list[Any] = []
    if (offsets := tensors.get("colbert_offsets")) is not None:
        colbert = np.split(tensors["colbert"], offsets[1:-1])
    rows = zip_longest(tensors.get("dense", []), sparse, colbert)
    return [TextEmbedding(*row) for row in rows], report
