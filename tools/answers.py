"""Vectors as answers write them, made into arrays again, as a client does it."""

from typing import Any

import numpy as np
import numpy.typing as npt

from smart_embedder.engine.records import FloatArray, SparseVector, TextEmbedding

SIGNS = ("binary", "ubinary")


def array_in_msgpack(record: dict[Any, Any]) -> Any:
    """An array as msgpack-numpy writes it; any other map as it is."""
    if b"nd" not in record:
        return record
    # PyTorch, which rounds to half precision, warns of arrays that cannot be written.
    return np.array(np.frombuffer(record[b"data"], record[b"type"]).reshape(record[b"shape"]))


def restored(
    numbers: npt.NDArray[Any], dtype: str, width: int | None = None
) -> npt.NDArray[np.float32]:
    """bfloat16 from the upper halves of float32's bits; signs, eight to a byte, as 1 and -1."""
    if dtype == "bfloat16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    bits = numbers.astype(np.int16) + (128 if dtype == "binary" else 0)
    return np.unpackbits(bits.astype(np.uint8), axis=-1, count=width) * np.float32(2) - 1


def embedding_in(vectors: dict[str, Any]) -> TextEmbedding:
    """The `embeddings` of a text in a native answer; null is no vector."""

    def array(numbers: Any) -> FloatArray | None:
        return None if numbers is None else np.asarray(numbers, np.float32)

    if sparse := vectors["sparse"]:
        indices, values = sparse["indices"], sparse["values"]
        sparse = SparseVector(np.asarray(indices, np.int64), np.asarray(values, np.float32))
    return TextEmbedding(array(vectors["dense"]), sparse, array(vectors["colbert"]))
