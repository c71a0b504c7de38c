"""Arrow in: what is read of a stream and in which steps, and what of one is refused.

That its rows are those of pyarrow, and that nothing else that arrives is a crash: tests/fuzzing.
"""

import io
import struct
from itertools import pairwise

import pyarrow as pa
import pytest

from smart_embedder.api.stream.arrow_lines import ArrowReader
from smart_embedder.api.stream.lines import Line
from smart_embedder.errors import BodyTooLargeError, InvalidRequestError
from tests.fuzzing.arrow_streams import stream_of
from tests.fuzzing.inputs import lines_of


def take(reader: ArrowReader, max_lines: int, max_bytes: int) -> list[Line]:
    """The next rows, which come in one step."""
    with pytest.raises(StopIteration) as end:
        next(reader.take(max_lines, max_bytes))
    lines: list[Line] = end.value.value
    return lines


TEXTS = ["a", "bé", None, "x" * 300, "", "字"]


def read(content: bytes) -> tuple[bool, list[Line]]:
    reader = ArrowReader(1 << 20)
    lines = [*lines_of(reader, [content])]
    return reader.integer_ids, lines


def test_a_row_is_as_large_as_its_bytes_in_the_body_good_or_bad() -> None:
    ids = pa.array([b"bb", b"b", b"b"]).cast(pa.string())
    texts = pa.array(["字" * 5, "a", None])
    _, lines = read(stream_of(pa.table({"id": ids, "text": texts})))
    assert [line.size for line in lines] == [25, 10, 9], "with its offsets, of 4 bytes each"
    _, lines = read(stream_of(pa.table({"text": ["字"], "id": pa.array([1], pa.int16())})))
    assert [line.size for line in lines] == [9]
    content = stream_of(pa.table({"text": ["abc"]}))
    _, (bad,) = read(content.replace(b"abc", b"ab\xff"))
    assert (bad.size, "not UTF-8" in str(bad.error)) == (7, True)


def test_many_rows_are_read_in_steps_of_64_kib_and_those_without_text_many_in_a_piece() -> None:
    reader = ArrowReader(1 << 25)
    reader.feed(stream_of(pa.table({"text": ["x" * 1000] * 1000}), 1000))
    lefts = [1000, *(reader._batch.left for _ in reader.take(1000, 1 << 30))]
    steps = [before - after for before, after in pairwise(lefts)]
    assert steps == [66] * (1000 // 66)  # Of a thousand bytes each.
    reader = ArrowReader(1 << 20)
    reader.feed(stream_of(pa.table({"text": [""] * 1000}), 1000))
    assert [len(take(reader, 500, 400)) for _ in range(3)] == [100, 100, 100]


@pytest.mark.parametrize(
    ("ids", "expected", "integers"),
    [
        (pa.array([5, None, 7, 8, 9, -1], pa.int16()), [5, 1, 7, 8, 9, -1], True),
        (pa.array(range(6), pa.uint32()), [*range(6)], True),
        (pa.array(["p", None, "r", "s", "", "ü"]), ["p", 1, "r", "s", "", "ü"], False),
    ],
)
def test_ids_are_those_of_the_column(ids, expected, integers: bool) -> None:
    for names in (["text", "id"], ["id", "text"]):
        columns = {"text": pa.array(TEXTS), "id": ids}
        found, lines = read(stream_of(pa.table({name: columns[name] for name in names})))
        assert found is integers
        assert [line.id for line in lines] == expected
        assert [line.number for line in lines] == [1, 2, 3, 4, 5, 6]
        assert str(lines[2].error) == "the field text is null: send a string"


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"texts": TEXTS}),
        pa.table({"text": TEXTS, "more": TEXTS}),
        pa.table({"text": [1, 2]}),
        pa.table({"text": TEXTS, "id": [0.5] * 6}),
        pa.table({"text": pa.array(TEXTS).dictionary_encode()}),
        pa.table({"text": pa.array(TEXTS, pa.string_view())}),
        pa.table({"id": [1, 2]}),
    ],
)
def test_other_columns_are_refused(table: pa.Table) -> None:
    with pytest.raises(InvalidRequestError, match="send a column text of type utf8"):
        read(stream_of(table))


def test_numbers_in_the_other_byte_order_are_refused() -> None:
    """Read as they are they would be others. The order stands in byte 40, if at all."""
    content = bytearray(stream_of(pa.table({"id": pa.array([1]), "text": [""]})))
    assert content[40:44] == b"\0\0\4\0"
    content[40] = 4
    assert pa.ipc.open_stream(bytes(content)).read_all()["id"].to_pylist() == [1 << 56]
    with pytest.raises(InvalidRequestError, match="big-endian: write it little-endian"):
        read(bytes(content))


def test_it_has_begun_when_the_columns_are_known_and_is_ready_when_a_row_is_there() -> None:
    content, reader, seen = stream_of(pa.table({"text": TEXTS})), ArrowReader(1 << 20), []
    for start in range(0, len(content), 8):
        reader.feed(content[start : start + 8])
        state = reader.begun, reader.ready, reader.buffered > 0
        if state not in seen:
            seen.append(state)
    assert seen == [
        (False, False, True), (True, False, False), (True, False, True), (True, True, True)
    ]  # fmt: skip
    reader.end()
    while reader.ready:
        left = reader.buffered
        (line,) = take(reader, 1, 1)
        assert reader.buffered <= left
    assert (line.number, reader.buffered, take(reader, 1, 1)) == (6, 0, [])


@pytest.mark.parametrize("offsets", [(-1, 1, 2), (0, 1, 3), (0, 2, 1), (0, 9, 2)])
def test_offsets_that_do_not_fit_the_data_are_refused(offsets: tuple[int, ...]) -> None:
    content = stream_of(pa.table({"text": ["a", "b"]}))
    before, right, data = content.rpartition(struct.pack("<iii", 0, 1, 2))
    assert right
    with pytest.raises(InvalidRequestError, match="the offsets of a column do not fit its data"):
        read(before + struct.pack("<iii", *offsets) + data)


def test_a_record_batch_that_is_too_large_is_refused_before_it_has_arrived() -> None:
    content = stream_of(pa.table({"text": ["x" * 5000]}))
    reader = ArrowReader(1000)
    reader.feed(content[:2000])
    with pytest.raises(BodyTooLargeError, match="MAX_BODY_BYTES"):
        assert reader.ready


def test_countless_batches_without_rows_are_refused() -> None:
    table = pa.table({"text": ["a"]})
    for count in (200, 300):
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            for _ in range(count):
                writer.write_batch(pa.record_batch([pa.array([], pa.string())], table.schema))
            writer.write_table(table)
        if count == 200:
            assert [line.text for line in read(sink.getvalue())[1]] == ["a"]
    with pytest.raises(InvalidRequestError, match="more than 250 messages in a row have no rows"):
        read(sink.getvalue())


COMPRESSED = stream_of(
    pa.table({"text": TEXTS}), options=pa.ipc.IpcWriteOptions(compression="zstd")
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((content, "no Arrow IPC stream") for content in (b"", b"ARROW1\0\0" + bytes(100))),
        (b'{"text": "a"}\n' * 9, "no Arrow IPC stream"),
        (COMPRESSED, "Content-Encoding: gzip"),
    ],
    ids=["nothing", "a file", "lines", "compressed batches"],
)
def test_what_is_no_arrow_stream_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read(content)


def test_nulls_are_told_for_every_row_or_the_batch_is_refused() -> None:
    content = stream_of(pa.table({"text": ["a", None] * 10}), 20)
    _, lines = read(content)
    assert [line.error is None for line in lines] == [True, False] * 10
    # Three bytes of bits, and what follows them.
    bits, fewer = struct.pack("<qqq", 0, 3, 8), struct.pack("<qqq", 0, 2, 8)
    assert content.count(bits) == 1
    with pytest.raises(InvalidRequestError, match="a buffer is too short"):
        read(content.replace(bits, fewer))


def test_a_stream_that_is_cut_off_is_refused_after_the_rows_before() -> None:
    reader = ArrowReader(1 << 20)
    reader.feed(stream_of(pa.table({"text": TEXTS}))[:-100])
    reader.end()
    assert len(take(reader, 10, 1 << 20)) == 3
    with pytest.raises(InvalidRequestError, match="it ends too early"):
        take(reader, 10, 1 << 20)


@pytest.mark.parametrize("junk", [b"\0", b"\0" * 7, b"\xff\xfe"])
def test_what_follows_the_messages_and_begins_none_is_told_at_once(junk: bytes) -> None:
    """Zeros are the end in the format before 0.15, which is not read."""
    reader = ArrowReader(1 << 20)
    reader.feed(stream_of(pa.table({"text": TEXTS}), 6)[:-8] + junk)
    assert len(take(reader, 6, 1 << 20)) == len(TEXTS)
    with pytest.raises(InvalidRequestError, match="send the stream format"):
        take(reader, 1, 1 << 20)


def with_node(length: int, nulls: int) -> bytes:
    """A stream of a text and of none, whose column says how many it has, and how many are null."""
    content, node = stream_of(pa.table({"text": ["a", None]})), struct.pack("<qq", 2, 1)
    assert content.count(node) == 1
    return content.replace(node, struct.pack("<qq", length, nulls))


def test_without_nulls_each_row_has_its_text_whatever_the_bits_say() -> None:
    """As Arrow's own libraries read it."""
    content = with_node(2, 0)
    expected = pa.ipc.open_stream(content).read_all().column("text").to_pylist()
    _, lines = read(content)
    assert [line.text for line in lines] == expected == ["a", ""]
    assert not any(line.error for line in lines)
    assert str(read(with_node(2, 1))[1][1].error) == "the field text is null: send a string"


@pytest.mark.parametrize("length", [1, 3, -1])
def test_a_column_of_another_length_than_its_batch_is_refused(length: int) -> None:
    with pytest.raises(InvalidRequestError, match="another number of rows than its batch"):
        read(with_node(length, 1))
