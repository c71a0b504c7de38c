"""Lines of a stream: those between its line ends, which hold what Python's own parser reads."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

from smart_embedder.api import body
from smart_embedder.api.stream import lines
from smart_embedder.api.stream.lines import NdjsonReader
from smart_embedder.errors import BodyTooLargeError
from tests.fuzzing.inputs import (
    Target,
    check_sentence,
    count_plainly,
    cut,
    linear,
    lines_of,
    outcome,
    read_input,
    seeds_of,
)

_MOST_BYTES_OF_A_LINE = 600
_HARMLESS_BYTES = 200


def _small_parts() -> ExitStack:
    """So that some bytes are many parts."""
    stack = ExitStack()
    stack.enter_context(patch.multiple(body, _STEP_BYTES=24, _STEP_STRINGS=3, _HUGE_BODY=300))
    stack.enter_context(
        patch.multiple(lines, _HARMLESS_BYTES=_HARMLESS_BYTES, STEP_BYTES=64, _MAX_BAD_LINES=3)
    )
    return stack


def seeds() -> Iterator[bytes]:
    good = (
        b'{"text": "a"}\n{"id": 7, "text": "\\u00e9\\n"}\n"only a text"\n{"id": "x", "text": "b"}'
    )
    bad = b'{"id": [], "text": "a"}\n\n  \r\n{"sentence": "a"}\n{"text": 1, "text": "a"}\n'
    bad += b"[1]\n}\n\xff"
    long = b'{"text": "' + b"word \\u0041 " * 30 + b'"}\n'
    names = b"{" + b",".join(b'"n%d": 1' % i for i in range(30)) + b"}\n"
    return seeds_of([good, bad, long + good, names + good, b'"' + b"x" * 700 + b'"\n"a"'])


def check(data: bytes) -> None:
    """However a body is cut, its lines are those between its line ends, and hold what they say."""
    chance, content = read_input(data)
    pieces, most_lines = cut(content, chance), chance.randint(1, 9)
    most_bytes = chance.randint(1, 5000)
    reader = NdjsonReader(_MOST_BYTES_OF_A_LINE)
    with _small_parts(), linear(content, calls_per_byte=200):
        found = [*lines_of(reader, pieces, most_lines, most_bytes)]
    filled = [(i, each) for i, each in enumerate(content.split(b"\n"), 1) if each.strip()]
    assert [line.number for line in found] == [number for number, _ in filled]
    for index, (line, (_, raw)) in enumerate(zip(found, filled, strict=True)):
        _check_line(line, raw.lstrip(), index)


def _check_line(line: lines.Line, raw: bytes, index: int) -> None:
    assert line.size == len(raw)
    if line.error is not None:
        check_sentence(line.error)
        assert line.id == index
        assert isinstance(line.error, BodyTooLargeError) == (len(raw) > _MOST_BYTES_OF_A_LINE)
        assert _may_be_refused(raw), line.error
        return
    assert len(raw) <= _MOST_BYTES_OF_A_LINE
    value = json.loads(raw.decode())
    value = {"text": value} if isinstance(value, str) else value
    assert value.keys() <= {"text", "id"}
    assert type(line.text) is str
    assert line.text == value["text"]
    assert line.id == (index if value.get("id") is None else value["id"])
    assert type(line.id) in {int, str}
    line.text.encode()


def _may_be_refused(raw: bytes) -> bool:
    """Whether it is no line of a text, by its plain meaning, or more than one needs."""
    values, outside = count_plainly(raw)
    if len(raw) > _HARMLESS_BYTES and (values > lines._MAX_VALUES or outside > _HARMLESS_BYTES):
        return True
    if len(raw) > _MOST_BYTES_OF_A_LINE:
        return True
    value, refused = outcome(lambda: json.loads(raw.decode()), ValueError, RecursionError)
    if refused is not None or "\\ud" in repr(value) or b"NaN" in raw or b"Infinity" in raw:
        return True
    if isinstance(value, str):
        return False
    if not isinstance(value, dict) or not value.keys() <= {"text", "id"}:
        return True
    name = value.get("id")
    is_name = (
        name is None or isinstance(name, str) or (type(name) is int and -(2**63) <= name < 2**63)
    )
    return not (isinstance(value.get("text"), str) and is_name) or values > 200


TARGETS = {"lines": Target(seeds, check, 1500)}
