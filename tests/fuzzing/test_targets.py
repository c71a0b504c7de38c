"""Targets pass on correct parsers, and find faults that are planted in them.

These tests compare the parsers with their references; other tests only cover what they refuse.
"""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from smart_embedder_client import safetensors as client_format

from app.body import JsonValueCounter
from app.connection import BoundedConnection
from smart_embedder.models.files import weights
from tests.fuzzing import request_heads
from tests.fuzzing.inputs import CONTROL, MODULES, linear, load


@pytest.mark.parametrize("name", MODULES)
def test_seeds_of_fuzzing_pass(name: str) -> None:
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


def changed(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    content = bytearray(data)
    for index, byte in changes:
        content[index % len(content)] = byte
    return bytes(content)


@pytest.mark.parametrize("name", MODULES)
@given(
    data=st.data(),
    control=st.binary(min_size=CONTROL, max_size=CONTROL),
    changes=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=3),
)
def test_changed_and_generated_inputs_pass(
    name: str, data, control: bytes, changes: list[tuple[int, int]]
) -> None:
    target = load(name)
    inputs = st.sampled_from([*target.seeds()])
    if name == "bodies":  # The seeds rarely stay valid when bytes change.
        inputs |= JSON.map(lambda content: control + content)
    target.check(changed(data.draw(inputs), changes))


def test_requests_reach_the_app() -> None:
    """Otherwise nothing would be compared."""
    content = b"GET /a?b HTTP/1.1\r\nHost: x\r\n\r\n" * 2
    assert request_heads._serve([content])[0] == request_heads.read_plainly(content)


FAULTS = {
    "heads": (BoundedConnection, "on_header", BoundedConnection.__mro__[1].on_header),
    "bodies": (JsonValueCounter, "feed", lambda *_: None),
    "checkpoints": (weights, "_STORED_DTYPES", weights._STORED_DTYPES | {"F32": torch.int32}),
    "answers": (client_format, "_BFLOAT16", "none"),
}


@pytest.mark.parametrize("name", MODULES)
def test_planted_faults_are_found(name: str, monkeypatch) -> None:
    target = load(name)
    monkeypatch.setattr(*FAULTS[name])
    with pytest.raises((AssertionError, KeyError)):  # noqa: PT012 - any seed may find it
        for seed in target.seeds():
            target.check(seed)


def test_more_than_linear_work_is_found(monkeypatch) -> None:
    monkeypatch.setattr("tests.fuzzing.inputs._MEASURED", 1)
    content = bytes(1000)
    with linear(content, calls_per_byte=2):
        [bytes(byte) for byte in content]
    with pytest.raises(AssertionError, match="calls"), linear(content, 2):  # noqa: PT012
        for _ in range(100):
            [len(content) for _ in content]
    with pytest.raises(AssertionError, match="bytes"), linear(content, 2):
        bytes(2_000_000)
