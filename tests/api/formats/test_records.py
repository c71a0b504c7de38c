"""The records of a stream: in each format the vectors, ids, warnings and errors, in order."""

import json
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from smart_embedder.api.formats.records import ARROW, WRITERS, Record, RecordOptions
from smart_embedder.api.formats.vectors import vectors_of
from smart_embedder.engine.records import (
    EmbedRequest,
    Outputs,
    SparseVector,
    TextEmbedding,
    TokenStrings,
)
from tests.support.formats import READERS, arrays_of, assert_arrays, facts_of

WIDTHS = (16, 8)
NAMES = {"model_name": "d"}
KINDS = [
    Outputs(dense=True, sparse=True, colbert=True),
    Outputs(dense=True),
    Outputs(sparse=True),
    Outputs(colbert=True),
]
CUT, FAILED = [{"code": "input_truncated"}], {"status": 422, "detail": "no text"}
Row = dict[str, Any]


def embedding(seed: int, outputs: Outputs, tokens: int = 5) -> TextEmbedding:
    random = np.random.default_rng(seed)
    weights = SparseVector(np.arange(tokens) + seed, random.random(tokens, np.float32))
    return TextEmbedding(
        random.normal(size=WIDTHS[0]).astype(np.float32) if outputs.dense else None,
        weights if outputs.sparse else None,
        random.normal(size=(tokens, WIDTHS[1])).astype(np.float32) if outputs.colbert else None,
    )


def assert_same(found: list[Row], records: list[Record]) -> None:
    for row, record in zip(found, records, strict=True):
        facts = facts_of(row)
        assert facts == orjson.loads(orjson.dumps(record.facts))
        wanted = {} if record.vectors is None else arrays_of(record.vectors)
        given = {name: row[name] for name in row if name not in facts and row[name] is not None}
        assert_arrays(given, wanted)


@pytest.mark.parametrize("ids", [[3, 1, 2, 0, None], ["x", "", "ü", "3", None]], ids=str)
@pytest.mark.parametrize("outputs", KINDS, ids=str)
@pytest.mark.parametrize("accept", WRITERS)
def test_every_record_is_read_as_it_was_whatever_stands_beside_it(accept, outputs, ids) -> None:
    dtype = "int8" if outputs.dense or outputs.colbert else "float32"
    muvera = "document" if outputs.colbert else None
    tokens = outputs.sparse or outputs.colbert
    options = EmbedRequest([], outputs, output_dtype=dtype, muvera=muvera, return_tokens=tokens)
    strings = TokenStrings(
        list("abcde") if outputs.sparse else None, list("fghij") if outputs.colbert else None
    )
    made = [
        vectors_of(embedding(seed, outputs), options, strings if tokens else None)
        for seed in range(2)
    ]
    records = [
        Record(ids[0], None, error=FAILED),
        Record(ids[1], made[0]),
        Record(ids[2], made[1], CUT),
        Record(ids[3], None, error=FAILED),
        Record(ids[4], None, error=FAILED),
    ]
    writer = WRITERS[accept](
        RecordOptions(
            options, NAMES, WIDTHS, integer_ids=isinstance(ids[0], int), sparse_as_indices=True
        )
    )
    # In several calls, of which the first has no vectors, and one has no errors.
    parts = [b"".join(writer.write(records[part])) for part in (slice(2), slice(2, 3), slice(3, 5))]
    read = READERS[accept]
    assert_same(read(parts[0]), records[:2])
    content = b"".join([*parts, writer.end()])
    assert_same(read(content), records)
    if accept == ARROW:
        schema = pa.ipc.open_stream(content).schema
        assert schema.field("id").type == (pa.int64() if ids[0] == 3 else pa.string())
        told = json.loads(schema.metadata[b"smart-embedder"])
        assert told == NAMES | {"output_dtype": dtype}


@pytest.mark.parametrize("outputs", KINDS, ids=str)
@pytest.mark.parametrize("tokens", [False, True])
def test_a_stream_of_no_record_has_the_columns_of_one_that_has_some(outputs, tokens) -> None:
    schemas = []
    for count in (0, 1):
        muvera = "query" if outputs.colbert else None
        options = EmbedRequest([], outputs, muvera=muvera, return_tokens=tokens)
        writer = WRITERS[ARROW](RecordOptions(options, NAMES, WIDTHS))
        strings = TokenStrings(
            ["a"] * 5 if outputs.sparse else None, ["b"] * 5 if outputs.colbert else None
        )
        vectors = vectors_of(embedding(1, outputs), options, strings if tokens else None)
        parts = [b"".join(writer.write([Record("x", vectors)])) for _ in range(count)]
        table = pa.ipc.open_stream(b"".join([*parts, writer.end()])).read_all()
        assert len(table) == count
        schemas.append(table.schema)
    assert schemas[0].equals(schemas[1], check_metadata=True)
    for accept in set(WRITERS) - {ARROW}:
        assert WRITERS[accept](RecordOptions(options, NAMES, WIDTHS)).end() == b""
