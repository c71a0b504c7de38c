"""The count of values in a body agrees with a real parser, however the body is cut into chunks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.api import body
from app.api.body import JsonValueCounter
from app.api.dialects import openai
from app.api.endpoints import embeddings
from app.api.schemas import EmbeddingRequest
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


def is_refused(sent: bytes, most: int, chunk: int) -> bool:
    counter = JsonValueCounter(most)
    try:
        for start in range(0, len(sent), chunk):
            counter.feed(sent[start : start + chunk])
    except InvalidRequestError:
        return True
    return False


@given(JSON, st.integers(1, 9), st.booleans())
def test_a_body_is_refused_from_the_first_value_too_many_on(value, chunk, ascii_only) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    count = pieces(value)
    assert not is_refused(text, count, chunk)
    assert is_refused(text, count - 1, chunk) or count == 0


@pytest.mark.parametrize(
    "text", ["," * 9999, '"' * 9999, "\\" * 9999, '[{":,\\"' * 999, "é" * 9999]
)
def test_what_stands_inside_a_text_does_not_count(text: str) -> None:
    sent = json.dumps({"sentences": [text]}).encode()
    for chunk in (1, 2, 3, 1000, 1 << 20):
        assert not is_refused(sent, 3, chunk)


def test_a_body_of_another_api_is_told_apart_without_a_description_of_its_errors(
    monkeypatch,
) -> None:
    """The search for similar names takes a tenth of a small request."""
    monkeypatch.setattr(body, "as_invalid_request", None)
    sent = b'{"input": ["a"], "model": "m", "encoding_format": "base64"}'
    with pytest.raises(ValidationError) as raised:
        EmbeddingRequest.model_validate_json(sent)
    form = body._tell_apart(raised.value, len(sent), embeddings._OPERATION, [openai.EMBEDDINGS])
    assert form is openai.EMBEDDINGS
