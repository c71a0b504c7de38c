"""Reads an answer with vectors in each of its formats, by the formats' own libraries."""

import io
from typing import Any

import msgpack
import numpy as np
import orjson
import pyarrow as pa
import safetensors

from smart_embedder.api.formats.vectors import TextVectors

JSON, NDJSON = "application/json", "application/x-ndjson"
ARROW, MSGPACK, SAFETENSORS = (
    *("application/vnd.apache.arrow.stream", "application/msgpack"),
    "application/vnd.safetensors",
)

Item = dict[str, Any]


def decode(accept: str, content: bytes) -> tuple[list[Item], Item]:
    """The arrays of each text, without the kinds that are null, and what else is told."""
    items, told = DECODERS[accept](content)
    return [{name: each for name, each in item.items() if each is not None} for item in items], told


def arrays_of(vectors: TextVectors) -> Item:
    """What a reader should find of them."""
    item: Item = {"muvera": vectors.muvera}
    for name, each in (("dense", vectors.dense), ("colbert", vectors.colbert)):
        item[name] = None if each is None else each.values
        item[f"{name}_scale"] = None if each is None else each.scales
    if vectors.sparse is not None:
        item["sparse"] = {"indices": vectors.sparse.indices, "values": vectors.sparse.values}
    if vectors.tokens is not None:
        item |= {"sparse_tokens": vectors.tokens.sparse, "colbert_tokens": vectors.tokens.colbert}
    return {name: each for name, each in item.items() if each is not None}


def assert_arrays(found: Item, expected: Item) -> None:
    """Exactly the numbers and strings that are expected, and no others."""
    assert set(found) == set(expected)
    for name, each in expected.items():
        if isinstance(each, dict):
            assert_arrays(found[name], each)
        elif isinstance(each, list):
            assert found[name] == each
        else:
            np.testing.assert_array_equal(np.asarray(found[name], each.dtype), each, name)


def from_arrow(content: bytes) -> tuple[list[Item], Item]:
    table = pa.ipc.open_stream(content).read_all()
    table.validate(full=True)
    assert table["id"].to_pylist() == list(range(len(table)))
    items: list[Item] = [{} for _ in range(len(table))]
    for name in table.column_names[1:]:
        for item, value in zip(items, table[name], strict=True):
            item[name] = arrow_value(value)
    return items, orjson.loads(table.schema.metadata[b"smart-embedder"])


def arrow_value(value: pa.Scalar) -> Any:
    if pa.types.is_floating(value.type):
        return np.float32(value.as_py())
    inner = value.values
    if pa.types.is_struct(inner.type):
        return {
            "indices": inner.field("index").to_numpy(),
            "values": inner.field("value").to_numpy(),
        }
    if pa.types.is_string(inner.type):
        return inner.to_pylist()
    if pa.types.is_fixed_size_list(inner.type):
        return inner.flatten().to_numpy().reshape(-1, inner.type.list_size)
    return inner.to_numpy()


def _as_array(found: dict[Any, Any]) -> Any:
    if b"nd" not in found:
        return found
    return np.frombuffer(found[b"data"], found[b"type"]).reshape(found[b"shape"])


def from_msgpack(content: bytes) -> tuple[list[Item], Item]:
    answer = msgpack.unpackb(content, object_hook=_as_array, strict_map_key=False)
    items = answer.pop("data")
    assert [item["id"] for item in items] == list(range(len(items)))
    return [with_tokens(item) for item in items], answer


def with_tokens(item: Item) -> Item:
    tokens = {f"{kind}_tokens": each for kind, each in item.get("tokens", {}).items()}
    vectors: Item = item["embeddings"]
    return vectors | tokens


def from_safetensors(content: bytes) -> tuple[list[Item], Item]:
    tensors = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    arrays = {name: tensor_array(each) for name, each in tensors.items()}
    told = orjson.loads(
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
        if "tokens" in told:
            item |= {f"{kind}_tokens": each for kind, each in told["tokens"][i].items()}
        items.append(item)
    told.pop("tokens", None)
    return items, told


def tensor_array(tensor: Item) -> np.ndarray:
    names = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "i1", "U8": "u1", "I64": "<i8"}
    kind = names.get(tensor["dtype"], "<u4")
    return np.frombuffer(tensor["data"], kind).reshape(tensor["shape"])


def from_json(content: bytes) -> tuple[list[Item], Item]:
    answer = orjson.loads(content)
    return [with_tokens(item) for item in answer.pop("data")], answer


DECODERS = {
    ARROW: from_arrow,
    MSGPACK: from_msgpack,
    SAFETENSORS: from_safetensors,
    "application/json": from_json,
}


def records_of_ndjson(content: bytes) -> list[Item]:
    found = map(orjson.loads, content.splitlines())
    return [with_tokens({"embeddings": {}} | each) | facts_of(each) for each in found]


def facts_of(record: Item) -> Item:
    return {name: record[name] for name in ("id", "warnings", "error") if name in record}


def records_of_msgpack(content: bytes) -> list[Item]:
    unpacked = msgpack.Unpacker(io.BytesIO(content), object_hook=_as_array, strict_map_key=False)
    return [with_tokens({"embeddings": {}} | each) | facts_of(each) for each in unpacked]


def records_of_arrow(content: bytes) -> list[Item]:
    table = pa.ipc.open_stream(content).read_all()
    table.validate(full=True)
    rows: list[Item] = [{} for _ in range(len(table))]
    for name in table.column_names:
        for row, value in zip(rows, table[name], strict=True):
            if value.is_valid:
                plain = name in {"id", "warnings", "error"}
                row[name] = value.as_py() if plain else arrow_value(value)
    for row in rows:
        row |= {name: orjson.loads(row[name]) for name in ("warnings", "error") if name in row}
    return rows


def records_of_files(content: bytes) -> list[Item]:
    """Several files of safetensors, one after the other."""
    rows: list[Item] = []
    while content:
        start = 8 + int.from_bytes(content[:8], "little")
        header = orjson.loads(content[8:start])
        header.pop("__metadata__")
        end = start + max((each["data_offsets"][1] for each in header.values()), default=0)
        vectors, told = from_safetensors(content[:end])
        assert {"output_dtype", "model_name"} < set(told)
        left = iter(vectors)
        for facts in told["records"]:
            tokens = {f"{kind}_tokens": each for kind, each in facts.get("tokens", {}).items()}
            rows.append(facts_of(facts) | ({} if "error" in facts else next(left)) | tokens)
        assert not list(left)
        content = content[end:]
    return rows


# Of the records of a stream.
READERS = {
    NDJSON: records_of_ndjson,
    MSGPACK: records_of_msgpack,
    ARROW: records_of_arrow,
    SAFETENSORS: records_of_files,
}
