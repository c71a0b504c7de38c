"""The count of values in a body agrees with a real parser, however the body is cut into chunks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.body import JsonValueCounter
from app.errors import InvalidRequestError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('\\",:[{a'), inner),
)


def pieces(value: object) -> int:
    """Commas, colons and opening brackets that JSON needs for `value`."""
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(pieces, value))
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + len(value) + sum(map(pieces, value.values()))
    return 0


def is_refused(body: bytes, most: int, chunk: int) -> bool:
    counter = JsonValueCounter(most)
    try:
        for start in range(0, len(body), chunk):
            counter.feed(body[start : start + chunk])
    except InvalidRequestError:
        return True
    return False


@given(JSON, st.integers(1, 9), st.booleans())
def test_a_body_is_refused_from_the_first_value_too_many_on(value, chunk, ascii_only) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    count = pieces(value)
    assert not is_refused(body, count, chunk)
    assert is_refused(body, count - 1, chunk) or count == 0


@pytest.mark.parametrize(
    "text", ["," * 9999, '"' * 9999, "\\" * 9999, '[{":,\\"' * 999, "é" * 9999]
)
def test_what_stands_inside_a_text_does_not_count(text: str) -> None:
    body = json.dumps({"sentences": [text]}).encode()
    for chunk in (1, 2, 3, 1000, 1 << 20):
        assert not is_refused(body, 3, chunk)
