"""Arrow streams: the rows that pyarrow reads."""

import io
from collections.abc import Iterator

import pyarrow as pa

from smart_embedder.api.stream.arrow_lines import ArrowReader
from smart_embedder.api.stream.lines import Line
from smart_embedder.errors import SmartEmbedderError
from tests.fuzzing.inputs import (
    Target,
    check_sentence,
    cut,
    linear,
    lines_of,
    read_input,
    seeds_of,
)

_MOST_BYTES = 1 << 16
# Compressed batches, and messages as they were framed before Arrow 0.15.
_READ_BY_PYARROW_ALONE = ("compressed", "send the stream format", "big-endian")


def stream_of(table: pa.Table, rows_in_a_batch: int = 3, **options) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=rows_in_a_batch)
    return sink.getvalue()


def seeds() -> Iterator[bytes]:
    texts = pa.array(["a", "bé", None, "x" * 30, "", "字"])
    tables = [
        pa.table({"text": texts}),
        pa.table({"id": pa.array([5, None, 7, 8, 9, -1], pa.int16()), "text": texts}),
        pa.table({"text": texts.cast(pa.large_string()), "id": pa.array(range(6), pa.uint32())}),
        pa.table({"id": texts, "text": texts}),
        pa.table({"text": texts.slice(0, 0)}),
        pa.table({"text": texts.dictionary_encode()}),
        pa.table({"text": texts, "id": pa.array(range(6), pa.int64())}).replace_schema_metadata(
            {"a": "b"}
        ),
    ]
    contents = [stream_of(table, rows) for table in tables for rows in (2, 6)]
    zstd = pa.ipc.IpcWriteOptions(compression="zstd")
    return seeds_of([*contents, stream_of(tables[0], options=zstd), contents[0][:-8]])


def check(data: bytes) -> None:
    """Rows are pyarrow's rows, up to where the stream ends or is refused."""
    chance, content = read_input(data)
    pieces, most_lines = cut(content, chance), chance.randint(1, 9)
    most_bytes = chance.randint(1, 5000)
    found: list[Line] = []
    with linear(content, calls_per_byte=100):
        try:
            for line in lines_of(ArrowReader(_MOST_BYTES), pieces, most_lines, most_bytes):
                found.append(line)  # noqa: PERF402 - those before an error are kept
        except SmartEmbedderError as error:
            check_sentence(error)
            refused = str(error)
        else:
            refused = ""
    for index, line in enumerate(found):
        assert line.number == index + 1
        assert type(line.id) in {int, str}
        line.text.encode()
        if line.error is not None:
            check_sentence(line.error)
    # What pyarrow refuses was refused, or is read here for reasons that its own rows do not show.
    expected, is_whole = rows_of(content)
    for line, row in zip(found, expected, strict=False):
        _check_row(line, row)
    if is_whole:
        assert refused or len(found) == len(expected)
        is_known = any(reason in refused for reason in _READ_BY_PYARROW_ALONE)
        assert not refused or is_known or not _is_plain(content), refused


def rows_of(content: bytes) -> tuple[list[dict], bool]:
    """Rows of the stream, and whether it was read to its end."""
    rows: list[dict] = []
    try:
        with pa.ipc.open_stream(content) as reader:
            _ = reader.schema.names  # Raises where a name is not UTF-8.
            for batch in reader:
                if batch.num_rows > 8 * len(content):  # Of columns that hold nothing.
                    return rows, False
                batch.validate(full=True)
                rows += batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return rows, False
    return rows, True


def _check_row(line: Line, row: dict) -> None:
    assert line.id == (line.number - 1 if row.get("id") is None else row["id"])
    text = row.get("text")
    assert (line.error is not None) == (text is None)
    assert line.text == (text or "")


def _is_plain(content: bytes) -> bool:
    """Whether the columns are those that are read, in small batches that are not compressed."""
    with pa.ipc.open_stream(content) as reader:
        fields = {field.name: field.type for field in reader.schema}
        names, sizes = reader.schema.names, [batch.nbytes for batch in reader]
    strings = {pa.string(), pa.large_string()}
    whole = {pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()}
    return (
        sorted(names) in (["text"], ["id", "text"])
        and fields["text"] in strings
        and fields.get("id", pa.int64()) in strings | whole
        and max(sizes, default=0) < _MOST_BYTES
        and len(sizes) < 250
    )


TARGETS = {"arrow": Target(seeds, check)}
