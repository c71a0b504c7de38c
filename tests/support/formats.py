"""Reads responses with vectors in every format, by the libraries of the formats."""

from typing import Any

import numpy as np
import orjson
import safetensors

from app.answers import TextVectors
from app.message_pack import unpack

JSON, SAFETENSORS = "application/json", "application/vnd.safetensors"
MESSAGE_PACK = "application/msgpack"

Item = dict[str, Any]


def decode(accept: str, content: bytes) -> tuple[list[Item], Item]:
    """Return the arrays of each text, without null kinds, and the other members."""
    items, members = DECODERS[accept](content)
    arrays = [{name: value for name, value in item.items() if value is not None} for item in items]
    return arrays, members


def arrays_of(vectors: TextVectors) -> Item:
    """Return the arrays that a reader should find."""
    item: Item = {"muvera": vectors.muvera}
    for name, quantized in (("dense", vectors.dense), ("colbert", vectors.colbert)):
        item[name] = None if quantized is None else quantized.values
        item[f"{name}_scale"] = None if quantized is None else quantized.scales
    if vectors.sparse is not None:
        item["sparse"] = {"indices": vectors.sparse.indices, "values": vectors.sparse.values}
    if vectors.tokens is not None:
        item |= {"sparse_tokens": vectors.tokens.sparse, "colbert_tokens": vectors.tokens.colbert}
    return {name: array for name, array in item.items() if array is not None}


def assert_arrays(found: Item, expected: Item) -> None:
    """Compare numbers and strings; both items have the same names."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_arrays(found[name], value)
        elif isinstance(value, list):
            assert found[name] == value
        else:
            np.testing.assert_array_equal(np.asarray(found[name], value.dtype), value, name)


def with_tokens(item: Item) -> Item:
    tokens = {f"{kind}_tokens": strings for kind, strings in item.get("tokens", {}).items()}
    vectors: Item = item["embeddings"]
    return vectors | tokens


def from_safetensors(content: bytes) -> tuple[list[Item], Item]:
    tensors = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    arrays = {name: tensor_array(tensor) for name, tensor in tensors.items()}
    members = orjson.loads(
        orjson.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"][
            "smart-embedder"
        ]
    )
    by_text = [arrays[name] for name in ("dense", "muvera") if name in arrays]
    by_border = [arrays[name][1:] for name in arrays if name.endswith("_offsets")]
    count = len((by_text + by_border)[0]) if arrays else 0
    items: list[Item] = []
    for i in range(count):
        item = {
            name: arrays[name][i] for name in ("dense", "dense_scale", "muvera") if name in arrays
        }
        if "sparse_values" in arrays:
            part = slice(*arrays["sparse_offsets"][i : i + 2])
            item["sparse"] = {
                kind: arrays[f"sparse_{kind}"][part] for kind in ("indices", "values")
            }
        for name in ("colbert", "colbert_scale"):
            if name in arrays:
                item[name] = arrays[name][slice(*arrays["colbert_offsets"][i : i + 2])]
        if "tokens" in members:
            item |= {f"{kind}_tokens": strings for kind, strings in members["tokens"][i].items()}
        items.append(item)
    members.pop("tokens", None)
    return items, members


def tensor_array(tensor: Item) -> np.ndarray:
    names = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "i1", "U8": "u1", "I64": "<i8"}
    kind = names.get(tensor["dtype"], "<u4")
    return np.frombuffer(tensor["data"], kind).reshape(tensor["shape"])


def from_json(content: bytes) -> tuple[list[Item], Item]:
    answer = orjson.loads(content)
    return [with_tokens(item) for item in answer.pop("data")], answer


DECODERS = {
    SAFETENSORS: from_safetensors,
    JSON: from_json,
}


def from_message_pack(content: bytes) -> Any:
    """Read MessagePack, with the arrays of msgpack-numpy.

    Clients read the service's responses with its library in `scripts/check_clients.sh`.
    """
    return _with_arrays(unpack(content, 1_000_000))


def _with_arrays(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_with_arrays, value))
    if isinstance(value, dict) and value.get(b"nd"):
        return np.frombuffer(value[b"data"], value[b"type"]).reshape(value[b"shape"])
    if isinstance(value, dict):
        return {name: _with_arrays(item) for name, item in value.items()}
    return value
