"""The vectors and scores in an answer of any dialect and format, and how far two answers differ.

Every format becomes the tree that it would be in JSON. Numbers are taken from below the names that
dialects give to vectors and scores; where a list is the whole answer, from all of it.
"""

import base64
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Any

import msgpack
import nanoarrow as na
import numpy as np
import numpy.typing as npt
from nanoarrow.ipc import InputStream
from safetensors import SafetensorError, deserialize

from smart_embedder.api.formats.records import ARROW, MSGPACK, SAFETENSORS
from smart_embedder.engine.space import SCORE, VECTORS
from tools.answers import SIGNS, array_in_msgpack, restored

Array = npt.NDArray[Any]
# A kind, and the place of its text in the answer; None for what is of the answer as a whole.
Row = tuple[str, int | None]
# The numbers of each row, by where they stand.
Numbers = dict[Row, dict[tuple[Any, ...], Array]]

# The end of the kind of vectors of which only the signs are there.
BITS = " bits"
_KIND_OF: Mapping[str, str] = (
    {kind: kind for kind in VECTORS}
    | {f"{kind}_scale": kind for kind in VECTORS}
    | {"muvera": "colbert"}
    | dict.fromkeys(("score", "relevance_score", "parts"), SCORE)
)
_VECTORS = {"embedding", "embeddings"}
_ABOUT = {"index", "id", "label", "text"}
_RESTORED = ("bfloat16", *SIGNS)
_DTYPES = ("int8", "uint8", "float16", *_RESTORED)
_SAFETENSORS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8"}
_SAFETENSORS |= {"I64": "int64", "U32": "uint32"}
# Scores and sparse vectors whose squared lengths are below it decide nothing.
_LIGHT = 1e-2


def numbers_of(content: bytes, media_type: str, kind: str, dtype: str) -> Numbers:
    """The numbers in an answer.

    `kind` is that of numbers whose place tells none, and `dtype` the format of numbers that the
    request asks for. Raises `ValueError` for an answer that cannot be read or has no numbers.
    """
    found: Numbers = defaultdict(dict)
    try:
        tree = _tree_of(content, media_type.partition(";")[0])
        placed = list(_walk(tree, (), dtype, inside=isinstance(tree, list)))
    except (LookupError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"the answer cannot be read: {error}") from None
    for place, stored in placed:
        numbers = stored
        kinds = [_KIND_OF[each] for each in place if each in _KIND_OF]
        own = SCORE if SCORE in kinds else next(iter(kinds), kind)
        named = next((each for each in place if each in _DTYPES), dtype)
        text = next((each for each in place if isinstance(each, int)), None)
        is_packed = own in {"dense", "colbert"} and numbers.dtype.kind in "iu"
        if is_packed and named in SIGNS:
            own += BITS
        if is_packed and named in _RESTORED:
            numbers = restored(numbers, named)
        found[own, None if own == SCORE else text][place] = numbers.astype(np.float32)
    if not found:
        raise ValueError("the answer has no vectors and no scores")
    return dict(found)


def dtype_of(body: Mapping[str, Any]) -> str:
    """The format of numbers that the body of a request asks for."""
    names = ("output_dtype", "embedding_type", "encoding_format")
    return next((body[name] for name in names if body.get(name) in _DTYPES), "float32")


def are_equal(before: Numbers, now: Numbers) -> bool:
    """Whether all numbers are the same to the last bit."""
    return before.keys() == now.keys() and all(
        row.keys() == now[name].keys()
        and all(np.array_equal(row[place], now[name][place]) for place in row)
        for name, row in before.items()
    )


def distance(before: Numbers, now: Numbers, row: Row) -> float:
    """How far the numbers of one row are apart: |a - b|^2 / (|a|^2 + |b|^2), 2 at most."""
    first, second = before.get(row, {}), now.get(row, {})
    apart = lengths = 0.0
    for place in first.keys() | second.keys():
        a, b = (each.get(place) for each in (first, second))
        one, other = (np.zeros(1) if each is None else each.astype(np.float64) for each in (a, b))
        if a is not None and b is not None and a.shape != b.shape:
            return 2.0
        apart += float(((one - other) ** 2).sum())
        lengths += float((one**2).sum() + (other**2).sum())
    return apart / max(lengths, _LIGHT if row[0] in {"sparse", SCORE} else 1e-12)


def _tree_of(content: bytes, media_type: str) -> Any:
    if media_type == ARROW:
        stream = na.ArrayStream(InputStream.from_readable(BytesIO(content)))
        return {"data": stream.read_all().to_pylist()}
    if media_type == MSGPACK:
        return msgpack.unpackb(content, strict_map_key=False, object_hook=array_in_msgpack)
    if media_type == SAFETENSORS:
        tensors = deserialize(content)  # type: ignore[no-untyped-call]
        return {"data": list(_texts_of(dict(tensors)))}
    return json.loads(content, object_hook=_of_base64)


def _of_base64(told: dict[str, Any]) -> Any:
    if told.keys() != {"dtype", "shape", "data"}:
        return told
    return _array(base64.b64decode(told["data"]), told["dtype"], told["shape"])


def _array(content: bytes, dtype: str, shape: list[int]) -> Array:
    stored = "uint16" if dtype == "bfloat16" else dtype
    array = np.frombuffer(content, np.dtype(stored).newbyteorder("<")).reshape(shape)
    return restored(array, dtype) if dtype == "bfloat16" else array


def _texts_of(tensors: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The vectors of each text in a file of safetensors."""
    arrays = {
        name: _array(each["data"], _SAFETENSORS[each["dtype"]], each["shape"])
        for name, each in tensors.items()
    }
    offsets = {
        name: arrays.pop(f"{name}_offsets") for name in VECTORS if f"{name}_offsets" in arrays
    }
    texts = min(
        [len(each) - 1 for each in offsets.values()]
        + [len(each) for name, each in arrays.items() if name.partition("_")[0] not in offsets]
    )
    for text in range(texts):
        told: dict[str, Any] = {}
        for name, array in arrays.items():
            kind, _, part = name.partition("_")
            begin, end = offsets[kind][text : text + 2] if kind in offsets else (text, text + 1)
            own = array[begin:end]
            if kind == "sparse":
                told.setdefault(kind, {})[part] = own
            else:
                told[name] = own if kind in offsets else own[0]
        yield told


def _walk(
    node: Any, place: tuple[Any, ...], dtype: str, *, inside: bool
) -> Iterator[tuple[tuple[Any, ...], Array]]:
    """Where numbers of vectors and scores stand, and the numbers."""
    match node:
        case {"indices": indices, "values": values}:
            for index, value in zip(indices, values, strict=True):
                yield (*place, str(index)), np.asarray(value)
        case dict():
            for name, each in node.items():
                if name not in _ABOUT:
                    within = inside or name in _KIND_OF or name in _VECTORS
                    yield from _walk(each, (*place, name), dtype, inside=within)
        case list() if not (inside and node and isinstance(node[0], int | float)):
            for position, each in enumerate(node):
                key = each.get("index", position) if isinstance(each, dict) else position
                yield from _walk(each, (*place, key), dtype, inside=inside)
        case str() if inside and {"embedding", "base64"} & {*place}:
            stored = {"binary": "int8", "ubinary": "uint8"}.get(dtype, dtype)
            content = base64.b64decode(node, validate=True)
            yield place, _array(content, stored, [len(content) // np.dtype(stored).itemsize])
        case list() | int() | float() | np.generic() | np.ndarray() if inside:
            yield place, np.asarray(node)
