"""Vectors in fewer bits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

OutputDtype = Literal["float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"]
OUTPUT_DTYPES: tuple[OutputDtype, ...] = get_args(OutputDtype)
_MAX_INT8 = 127
_UINT8_SHIFT = 128
_LEAST = 1e-12
# PyTorch divides more numbers than this among threads, which would take cores from the forward.
_PIECE = 32_768


@dataclass(frozen=True, slots=True)
class QuantizedVectors:
    """Vectors as `dtype` has them: `values` `[..., width]`, little-endian.

    - float32 and float16 are themselves; bfloat16 is the upper half of float32's bits, as uint16.
    - int8 times `scales` `[...]` float32 gives the vector back, within half a step; uint8 is 128
      more. The largest number of a vector is 127 or -127.
    - ubinary holds the signs, eight to a byte, the first in its highest bit: `[..., width / 8]`.
      binary is the same less 128, as int8. Source: sentence-transformers' `quantize_embeddings`.
    """

    dtype: OutputDtype
    values: npt.NDArray[Any]
    scales: FloatArray | None = None

    @property
    def type_name(self) -> str:
        """What an array of `values` holds: numpy's name, or bfloat16."""
        return "bfloat16" if self.dtype == "bfloat16" else self.values.dtype.name


def quantize(vectors: FloatArray, dtype: OutputDtype) -> QuantizedVectors:
    """Vectors `[..., width]` in another number format."""
    if dtype in {"int8", "uint8"}:
        return _scaled(vectors, dtype)
    return QuantizedVectors(dtype, _CONVERSIONS[dtype](vectors))


def scales_of(vectors: Sequence[QuantizedVectors]) -> FloatArray | None:
    """The scales of all of them, one after the other; None where the type has none."""
    scales = [np.atleast_1d(each.scales) for each in vectors if each.scales is not None]
    return np.concatenate(scales) if scales else None


def _scaled(vectors: FloatArray, dtype: OutputDtype) -> QuantizedVectors:
    largest = np.maximum(np.abs(vectors).max(axis=-1, keepdims=True), _LEAST)
    values = np.rint(vectors * (_MAX_INT8 / largest)).astype(np.int8)
    if dtype == "uint8":
        values = values.view(np.uint8) + np.uint8(_UINT8_SHIFT)  # Two's complement: modulo 256.
    return QuantizedVectors(dtype, values, np.asarray(largest[..., 0] / _MAX_INT8, np.float32))


def _rounded(vectors: FloatArray, dtype: Literal["float16", "bfloat16"]) -> npt.NDArray[Any]:
    """The bits of the nearest numbers, as uint16; PyTorch makes them 9 times as fast as numpy."""
    # Not before there are vectors: the port answers before PyTorch is loaded.
    import torch  # noqa: PLC0415 - see above

    bits = np.empty(vectors.shape, np.uint16)
    numbers = vectors.reshape(-1)
    rounded = torch.from_numpy(bits).view(getattr(torch, dtype)).view(-1)
    for begin in range(0, numbers.size, _PIECE):
        piece = slice(begin, begin + _PIECE)
        rounded[piece] = torch.from_numpy(numbers[piece])
    return bits


def _ubinary(vectors: FloatArray) -> npt.NDArray[np.uint8]:
    return np.packbits(vectors > 0, axis=-1)


_CONVERSIONS: Mapping[OutputDtype, Callable[[FloatArray], npt.NDArray[Any]]] = {
    "float32": lambda vectors: vectors,
    "float16": lambda vectors: _rounded(vectors, "float16").view(np.float16),
    "bfloat16": lambda vectors: _rounded(vectors, "bfloat16"),
    "ubinary": _ubinary,
    "binary": lambda vectors: (_ubinary(vectors) - np.uint8(_UINT8_SHIFT)).view(np.int8),
}
