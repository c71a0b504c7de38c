"""Each target passes what is read rightly, and finds what is not.

That a parser reads what its reference reads, however its input is cut, is shown here and not again
beside the tests of what it refuses.
"""

import gzip
import json

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from smart_embedder_client import safetensors as client_format

from smart_embedder.api import body
from smart_embedder.api.stream import arrow_lines, lines
from smart_embedder.engine.requests import shared_cache
from smart_embedder.middleware.body import _GzippedBody
from smart_embedder.models.checkpoint import weights
from smart_embedder.server.connection import BoundedConnection
from tests.fuzzing import request_heads
from tests.fuzzing.arrow_streams import stream_of
from tests.fuzzing.inputs import CONTROL, linear
from tests.fuzzing.targets import MODULES, load


@pytest.mark.parametrize("name", MODULES)
def test_what_a_target_begins_with_is_read_rightly(name: str) -> None:
    target = load(name)
    for seed in target.seeds():
        assert len(seed) <= target.longest
        target.check(seed)


SCALARS = st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False)
STRINGS = st.text('aé字\U0001f600\n\\",:[{/\x00', max_size=60)
STRINGS |= st.builds(str.__mul__, st.text("a字", min_size=1, max_size=4), st.integers(9, 30))
VALUES = st.recursive(
    SCALARS | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=12,
)
JSON = st.builds(
    lambda value, ascii_only, indent: json.dumps(
        value, ensure_ascii=ascii_only, indent=indent
    ).encode(),
    VALUES,
    st.booleans(),
    st.sampled_from([None, 2]),
)
IDS = st.integers(2**63 - 2, 2**63 + 2) | st.sampled_from([0, 1, ""]) | SCALARS | STRINGS
FIELDS = st.tuples(st.sampled_from(["text", "text", "tex\\u0074", "other"]), STRINGS | SCALARS)
FIELDS |= st.tuples(st.just("id"), IDS)
# A name may be there twice.
OBJECTS = st.lists(FIELDS, max_size=4).map(
    lambda fields: "{" + ", ".join(f'"{name}":{json.dumps(of)}' for name, of in fields) + "}"
)
LINES = JSON.map(lambda text: text.replace(b"\n", b"")) | OBJECTS.map(str.encode)
LINES |= st.sampled_from([b"", b"  ", b"\r", b"{", b"[1]", b"x" * 601, b'"' + b"y" * 700])
MEMBERS = (st.binary(max_size=40) | st.just(b"a" * 3000)).map(gzip.compress)
TABLES = st.builds(
    lambda texts, rows, kind: stream_of(pa.table({"text": pa.array(texts, kind)}), rows),
    st.lists(st.none() | st.text(max_size=10), max_size=10),
    st.integers(1, 5),
    st.sampled_from([pa.string(), pa.large_string()]),
)
# Made from the bottom up, where changes of what a target begins with would rarely be any.
CONTENTS = {
    "bodies": JSON,
    "lines": st.lists(LINES, max_size=12).map(b"\n".join),
    "gzip": st.lists(MEMBERS, max_size=12).map(b"".join),
    "arrow": TABLES,
}


def changed(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    content = bytearray(data)
    for place, byte in changes:
        content[place % len(content)] = byte
    return bytes(content)


@pytest.mark.parametrize("name", MODULES)
@given(
    data=st.data(),
    control=st.binary(min_size=CONTROL, max_size=CONTROL),
    changes=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=3),
)
def test_whatever_its_content_and_its_cuts_it_is_read_rightly(
    name: str, data, control: bytes, changes: list[tuple[int, int]]
) -> None:
    target = load(name)
    inputs = st.sampled_from([*target.seeds()])
    if name in CONTENTS:
        inputs |= CONTENTS[name].map(lambda made: control + made)
    target.check(changed(data.draw(inputs), changes))


def test_requests_reach_the_app() -> None:
    """Else nothing would be compared."""
    content = b"GET /a?b HTTP/1.1\r\nHost: x\r\n\r\n" * 2
    assert request_heads._serve([content])[0] == request_heads.read_plainly(content)


def begin_a_byte_late(body: _GzippedBody, begin=_GzippedBody._begin_member) -> None:
    begin(body)
    body._taken += 1


def read_nulls(values: arrow_lines._Values, row: int, get=arrow_lines._Values.get) -> object:
    values._valid = None
    return get(values, row)


FAULTS = {
    "heads": (BoundedConnection, "on_header", BoundedConnection.__mro__[1].on_header),
    "lines": (lines, "_is_id", lambda _: True),
    "bodies": (body, "_WITHIN_A_CHARACTER", range(0)),
    "arrow": (arrow_lines._Values, "get", read_nulls),
    "gzip": (_GzippedBody, "_begin_member", begin_a_byte_late),
    "checkpoints": (weights, "_STORED_DTYPES", weights._STORED_DTYPES | {"F32": torch.int32}),
    "entries": (shared_cache, "problem_of", lambda *_: None),
    "answers": (client_format, "_BFLOAT16", "none"),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_is_read_wrongly_is_found(name: str, monkeypatch) -> None:
    target = load(name)
    monkeypatch.setattr(*FAULTS[name])
    with pytest.raises((AssertionError, KeyError)):  # noqa: PT012 - whichever finds it
        for seed in target.seeds():
            target.check(seed)


def test_work_that_grows_faster_than_the_content_is_found(monkeypatch) -> None:
    monkeypatch.setattr("tests.fuzzing.inputs._MEASURED", 1)
    content = bytes(1000)
    with linear(content, calls_per_byte=2):
        [bytes(each) for each in content]
    with pytest.raises(AssertionError, match="calls"), linear(content, 2):  # noqa: PT012
        for _ in range(100):
            [len(content) for each in content]
    with pytest.raises(AssertionError, match="bytes"), linear(content, 2):
        bytes(2_000_000)
