"""Whether the arrays of an answer are those that were asked for; nothing else is believed."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from smart_embedder_client.safetensors import Array

_NUMPY_TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    # Which numpy does not have.
    "bfloat16": np.float32,
    "int8": np.int8,
    "binary": np.int8,
    "uint8": np.uint8,
    "ubinary": np.uint8,
}
_OF_BITS = ("binary", "ubinary")
_BITS = 8
_SCALED = ("int8", "uint8")


def dtype_of(options: Mapping[str, Any]) -> str:
    """The type of numbers that the options ask for."""
    return str(options.get("output_dtype", "float32"))


def check_tensors(
    tensors: Mapping[str, Array], options: Mapping[str, Any], texts: int, told: object
) -> None:
    """Raise `ValueError` unless these are the vectors of so many texts, with these options.

    `told` is what the answer says about the type of its numbers. A model that does not make a kind
    may leave it out where it was asked for by default alone.
    """
    if told != dtype_of(options):
        raise ValueError(f"numbers of the type {told!r:.80}")
    expected = set[str]()
    for kind, names, asked, is_needed in _kinds(options):
        if names[0] in tensors and not asked:
            raise ValueError(f"vectors that were not asked for: {kind}")
        if names[0] in tensors:
            expected.update(names)
        elif is_needed and texts:
            raise ValueError(f"no {kind} vectors")
    if set(tensors) != expected or bool(texts) != bool(expected):
        raise ValueError(f"the tensors {', '.join(sorted(tensors)) or 'are none'}")
    if texts:
        _check_arrays(tensors, options, texts)


def _kinds(options: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], bool, bool]]:
    """Each kind: its tensors, whether it was asked for, and whether it must be there."""
    is_scaled = dtype_of(options) in _SCALED
    dense = ("dense", "dense_scale") if is_scaled else ("dense",)
    colbert = ("colbert", "colbert_offsets", *(("colbert_scale",) if is_scaled else ()))
    sparse = ("sparse_offsets", "sparse_indices", "sparse_values")
    for kind, names in (("dense", dense), ("sparse", sparse), ("colbert", colbert)):
        given = options.get(f"return_{kind}")
        # The client's own default is without ColBERT.
        yield kind, names, given is not False and (given or kind != "colbert"), given is True
    muvera = options.get("muvera") is not None
    yield "muvera", ("muvera",), muvera, muvera


def _check_arrays(tensors: Mapping[str, Array], options: Mapping[str, Any], texts: int) -> None:
    dtype = dtype_of(options)
    numbers = _NUMPY_TYPES[dtype]
    for name in ("dense", "colbert"):
        if name in tensors:
            # Those of ColBERT are divided by their offsets.
            rows = texts if name == "dense" else len(tensors[name])
            _check_array(tensors, name, numbers, rows, 2)
            if dtype in _SCALED:
                _check_array(tensors, f"{name}_scale", np.float32, rows, 1)
    dimensions = options.get("dimensions")
    if "dense" in tensors and dimensions is not None:
        width = -(-dimensions // _BITS) if dtype in _OF_BITS else dimensions
        if tensors["dense"].shape[1] != width:
            raise ValueError(f"dense vectors of {tensors['dense'].shape[1]} numbers")
    if "muvera" in tensors:
        _check_array(tensors, "muvera", np.float32, texts, 2)
    if "colbert" in tensors:
        _check_offsets(tensors, "colbert_offsets", texts, len(tensors["colbert"]))
    if "sparse_offsets" in tensors:
        _check_sparse(tensors, texts)


def _check_array(
    tensors: Mapping[str, Array], name: str, dtype: Any, rows: int, dimensions: int
) -> None:
    """Raise `ValueError` unless it has so many rows, none of which is empty, of finite numbers."""
    array = tensors[name]
    if array.dtype != dtype or array.ndim != dimensions or len(array) != rows:
        raise ValueError(f"{name} of {array.dtype} in the shape {array.shape} for {rows} rows")
    if dimensions > 1 and not array.shape[1]:
        raise ValueError(f"{name} without numbers")
    # NaN and infinity show in the least and the largest number, without another array.
    if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
        raise ValueError(f"{name} with numbers that are not finite")


def _check_offsets(tensors: Mapping[str, Array], name: str, texts: int, rows: int) -> None:
    offsets = tensors[name]
    _check_array(tensors, name, np.int64, texts + 1, 1)
    if offsets[0] != 0 or offsets[-1] != rows or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{name} that do not divide {rows} rows")


def _check_sparse(tensors: Mapping[str, Array], texts: int) -> None:
    offsets, indices = tensors["sparse_offsets"], tensors["sparse_indices"]
    _check_offsets(tensors, "sparse_offsets", texts, len(indices))
    _check_array(tensors, "sparse_indices", np.uint32, len(indices), 1)
    _check_array(tensors, "sparse_values", np.float32, len(indices), 1)
    # Within a text they rise, so that none is there twice.
    falls = np.flatnonzero(indices[1:] <= indices[:-1]) + 1
    if not np.isin(falls, offsets).all():
        raise ValueError("sparse_indices that do not rise")
