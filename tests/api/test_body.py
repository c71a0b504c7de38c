"""The count of values in a body agrees with a real parser, however the body is cut into chunks."""

import difflib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers

import app.main  # noqa: F401 - every dialect has its requests
from app.api import body, validation_errors
from app.api.body import JsonValueCounter
from app.api.context import RequestContext
from app.api.dialects import openai
from app.api.dialects.cohere_embed import CohereEmbedRequest
from app.api.dialects.cohere_rerank import DocumentsRequest
from app.api.dialects.openai_schemas import OpenAIEmbeddingRequest
from app.api.dialects.tei_schemas import DecodeRequest
from app.api.endpoints import embeddings
from app.api.paths import NATIVE_EMBEDDINGS, Dialect
from app.api.schemas import EmbeddingRequest, RequestModel, RerankBody
from app.api.streams.lines import StreamLine
from app.errors import InvalidRequestError, UnsupportedMediaError

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


def parse(content: bytes) -> tuple[Any, int]:
    """What is parsed in steps, and how many steps it takes."""
    steps, count = body.parse_in_steps(bytearray(content)), 1
    while True:
        try:
            next(steps)
        except StopIteration as parsed:
            return parsed.value, count
        count += 1


STRINGS = st.text('aé字\U0001f600\n\\"/\x00', max_size=200)
NESTED = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
)


@given(value=NESTED, ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_parsed_in_steps_json_is_what_it_is_at_once(value, ascii_only, indent) -> None:
    content = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_STEP_BYTES", 24)
        assert parse(content)[0] == from_json(content)


@given(
    value=NESTED,
    changes=st.lists(
        st.tuples(st.integers(0), st.sampled_from(b'"\\u,:[]{}0\xff\xd8 ')), max_size=3
    ),
)
def test_what_is_no_json_is_none_in_steps_either(value, changes) -> None:
    content = bytearray(json.dumps(value).encode())
    for place, byte in changes:
        content[place % len(content)] = byte
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_STEP_BYTES", 24)
        try:
            expected = from_json(bytes(content))
        except ValueError:
            with pytest.raises(ValueError, match="at line|EOF"):
                parse(content)
        else:
            assert parse(content)[0] == expected


@pytest.mark.parametrize(
    "text", [b"\x80", b"\xf0", b"\xed\xa0\x80", b"\\u", b"\\ud83d", b"\\ude00", b"\\x", b"\n"]
)
def test_a_long_text_that_is_none_is_refused(text: bytes) -> None:
    for begin in range(8):
        with pytest.raises(ValueError, match="at line"):
            parse(b'["' + b"a" * begin + text * 100_000 + b'"]')


@pytest.mark.parametrize(
    "text",
    ["\\u0041", "\\ud83d\\ude00", "a\\ud83d\\ude00", "\\\\", '\\"', "\ufdfa", "\\n", "x\U0001f600"],
)
def test_a_long_text_is_parsed_in_steps_of_bounded_work(text: str, monkeypatch) -> None:
    """Whatever is in it, none of the steps parses much more than its part."""
    sizes = []
    monkeypatch.setattr(body, "from_json", lambda part: sizes.append(len(part)) or from_json(part))
    content = ('{"sentences": ["%s", "a"]}' % (text * (1_000_000 // len(text.encode())))).encode()
    value, steps = parse(content)
    assert value == from_json(content)
    assert max(sizes) < 70_000
    assert sum(sizes) < 3 * len(content)
    assert steps > 15


async def test_bytes_beside_the_texts_are_limited() -> None:
    """Blanks and digits cannot be parsed in steps."""
    counter = JsonValueCounter(100, 6400)
    counter.feed(b'{"sentences": ["' + b" " * 100_000 + b'"]')
    with pytest.raises(InvalidRequestError, match="more than 6400 bytes beside its texts"):
        counter.feed(b" " * 7000)


def test_an_api_is_told_by_its_field_without_a_description_of_errors(monkeypatch) -> None:
    """The search for similar names takes a tenth of a small request."""
    monkeypatch.setattr(body, "as_invalid_request", None)
    context = RequestContext("id", "/embeddings/", NATIVE_EMBEDDINGS, "192.0.2.1")
    request = Request({"type": "http", "state": {"context": context}})
    sent = b'{"input": ["a"], "model": "m", "encoding_format": "base64"}'
    forms = (embeddings._OPERATION, openai.EMBEDDINGS)
    form, _ = body._read(from_json(sent), forms, request)
    assert form is openai.EMBEDDINGS
    assert context.dialects == (Dialect.OPENAI,)


def all_requests(kind: type[RequestModel] = RequestModel) -> list[type[RequestModel]]:
    found = [each for sub in kind.__subclasses__() for each in (sub, *all_requests(sub))]
    return [each for each in dict.fromkeys(found) if each.__module__.startswith("app.")]


def lists_in(schema: Any) -> Iterator[dict[str, Any]]:
    """The lists of a schema whose items can be wrong: neither `Any` nor `JsonValue`."""
    if isinstance(schema, dict):
        items = schema.get("items_schema", {}).get("type")
        if schema.get("type") == "list" and items not in {"any", "definition-ref"}:
            yield schema
        for name, part in schema.items():
            if name != "metadata":
                yield from lists_in(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            yield from lists_in(part)


@pytest.mark.parametrize("model", all_requests(), ids=lambda model: model.__name__)
def test_every_list_of_a_request_stops_at_its_first_bad_item(model) -> None:
    assert all(each.get("fail_fast") for each in lists_in(model.__pydantic_core_schema__))


NAMES = {f"return_{i:05}": 0 for i in range(8000)}


@pytest.mark.parametrize(
    ("model", "sent"),
    [
        (EmbeddingRequest, NAMES),
        (EmbeddingRequest, {"sentences": ["a"]} | NAMES),
        (RerankBody, {"query": "a", "passages": ["b"], "weights": NAMES}),
        (StreamLine, NAMES),
        (CohereEmbedRequest, {"texts": ["a"], "embedding_types": ["x"] * 8000}),
        (OpenAIEmbeddingRequest, {"input": ["a"], "embedding_type": ["x"] * 8000}),
        (DocumentsRequest, {"query": "a", "documents": ["b"], "rank_fields": [1] * 8000}),
        (DecodeRequest, {"ids": [[1], *["x"] * 8000]}),
    ],
    ids=lambda case: case.__name__ if isinstance(case, type) else "",
)
def test_what_is_wrong_is_looked_for_and_told_ten_times_at_most(model, sent, monkeypatch) -> None:
    searches, found = Counter[str](), []
    search, tell = difflib.get_close_matches, validation_errors.as_invalid_request

    def counted_search(*args: Any) -> list[str]:
        searches["close matches"] += 1
        return search(*args)

    def counted_tell(error: ValidationError, *args: Any) -> InvalidRequestError:
        found.append(error.error_count())
        return tell(error, *args)

    monkeypatch.setattr(difflib, "get_close_matches", counted_search)
    monkeypatch.setattr(body, "as_invalid_request", counted_tell)
    with pytest.raises(InvalidRequestError) as raised:
        body.validate(sent, model)
    assert 0 < found[0] <= 12
    assert searches.total() <= 30
    assert 0 < len(raised.value.problems) <= 10


@pytest.mark.parametrize(
    "value", ['application/json; a="' + ";" * 60_000, "application/json" + "; a=b" * 10_000]
)
def test_a_content_type_of_any_length_is_not_parsed(value: str, monkeypatch) -> None:
    """email's parser would take seconds for it."""
    monkeypatch.setattr(body, "Message", None)
    with pytest.raises(UnsupportedMediaError, match="at most 1024 are read"):
        body._require_json(Headers({"Content-Type": value}))
