"""Each target passes what is read rightly, and finds what is not."""

import pytest
import torch
from smart_embedder_client import safetensors as client_format

from smart_embedder.api import body
from smart_embedder.api.stream import arrow_lines, lines
from smart_embedder.engine.requests import shared_cache
from smart_embedder.middleware.body import _GzippedBody
from smart_embedder.models.checkpoint import weights
from smart_embedder.server.connection import BoundedConnection
from tests.fuzzing import request_heads
from tests.fuzzing.inputs import linear
from tests.fuzzing.targets import MODULES, load


@pytest.mark.parametrize("name", MODULES)
def test_what_a_target_begins_with_is_read_rightly(name: str) -> None:
    target = load(name)
    for seed in target.seeds():
        assert len(seed) <= target.longest
        target.check(seed)


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
