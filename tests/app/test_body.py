"""Bodies are parsed by the schema of their discriminator, or refused with advice.

tests/fuzzing compares the values with a plain parser.
"""

import asyncio
import difflib
import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers

import app.main  # noqa: F401 - every dialect has its requests
from app import body
from app.body import JsonValueCounter
from app.dialects.cohere import CohereEmbedRequest
from app.dialects.openai import OpenAIEmbeddingRequest
from app.errors import ClientGoneError, UnsupportedMediaError
from app.schemas import EmbeddingRequest, RequestModel, RerankBody
from app.settings import Settings
from smart_embedder.errors import InvalidRequestError
from tests.support import bodies
from tests.support.bodies import validate


@pytest.mark.parametrize("before", [b"", b'"'])
@pytest.mark.parametrize(("marks", "is_too_many"), [(7, False), (8, True), (99, True)])
def test_json_values_are_counted_by_quotation_marks_without_commas(
    before, marks, is_too_many
) -> None:
    """The search must end early, because JSON has at most two more quotation marks than values."""
    counter = JsonValueCounter(2)
    counter.feed(before)
    with pytest.raises(InvalidRequestError, match="more th") if is_too_many else nullcontext():
        counter.feed(b'"' * marks)


def test_a_byte_order_mark_before_json_is_ignored() -> None:
    value = body.parse_json(BOM_UTF8 + b'{"sentences": ["a"]}', EmbeddingRequest)
    assert value == {"sentences": ["a"]}
    with pytest.raises(InvalidRequestError, match="is not JSON"):
        body.parse_json(BOM_UTF8 + BOM_UTF8 + b"{}", EmbeddingRequest)


SCHEMAS: tuple[type[RequestModel], ...] = (EmbeddingRequest, OpenAIEmbeddingRequest)


def all_requests(kind: type[RequestModel] = RequestModel) -> list[type[RequestModel]]:
    found = [
        schema
        for subclass in kind.__subclasses__()
        for schema in (subclass, *all_requests(subclass))
    ]
    return [schema for schema in dict.fromkeys(found) if schema.__module__.startswith("app.")]


def lists_in(schema: Any) -> Iterator[dict[str, Any]]:
    """The lists of a schema with items of a certain type: neither `Any` nor `JsonValue`."""
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
def test_validation_of_every_list_stops_at_the_first_bad_item(model) -> None:
    assert all(schema.get("fail_fast") for schema in lists_in(model.__pydantic_core_schema__))


NAMES = {f"return_{i:05}": 0 for i in range(8000)}


@pytest.mark.parametrize(
    ("model", "sent"),
    [
        (EmbeddingRequest, NAMES),
        (RerankBody, {"query": "a", "passages": ["b"], "weights": NAMES}),
        (OpenAIEmbeddingRequest, {"input": ["a"], "embedding_type": ["x"] * 8000}),
    ],
    ids=lambda case: case.__name__ if isinstance(case, type) else "",
)
def test_at_most_ten_problems_of_a_body_are_searched_and_reported(model, sent, monkeypatch) -> None:
    searches, found = Counter[str](), []
    search, tell = difflib.get_close_matches, bodies.invalid_request_error

    def counted_search(*args: Any) -> list[str]:
        searches["close matches"] += 1
        return search(*args)

    def counted_tell(errors: list[Any], *args: Any) -> InvalidRequestError:
        found.append(len(errors))
        return tell(errors, *args)

    monkeypatch.setattr(difflib, "get_close_matches", counted_search)
    monkeypatch.setattr(bodies, "invalid_request_error", counted_tell)
    with pytest.raises(InvalidRequestError) as raised:
        validate(sent, model)
    assert 0 < found[0] <= 12
    assert searches.total() <= 30
    assert 0 < len(raised.value.problems) <= 10


async def read(
    *parts: bytes,
    schemas: Sequence[type[RequestModel]] = SCHEMAS,
    most: int = 1000,
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", b"application/json"),),
    leaves: bool = False,
    lock: asyncio.Lock | None = None,
    **options: Any,
) -> Any:
    """Read a body of these chunks."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        if not left:
            return {"type": "http.disconnect"}
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left) or leaves}

    request = Request({"type": "http", "headers": list(headers)}, receive)
    return await body.read_body(request, schemas, most, lock or asyncio.Lock(), [], **options)


async def test_large_bodies_are_parsed_one_at_a_time_with_other_work_in_between(
    monkeypatch,
) -> None:
    order, lock = list[str](), asyncio.Lock()
    monkeypatch.setattr(body, "from_json", lambda text: order.append("parse") or from_json(text))
    large = json.dumps({"sentences": ["a" * 20_000]}).encode()

    async def others() -> None:
        while order.count("parse") < 3:
            order.append("other")
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await asyncio.gather(*(read(large, lock=lock) for _ in range(3)))
    await running
    assert "parse parse" not in " ".join(order)


async def refusal(*parts: bytes, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        await read(*parts, **options)
    assert refused.value.problems
    return str(refused.value)


@pytest.mark.parametrize("size", [1, 16_384, 300_000])
async def test_the_schema_of_a_body_follows_its_discriminator(size: int) -> None:
    text = "é\\" * (size // 4 + 1)
    for schema in SCHEMAS:
        field = schema.discriminator
        content = json.dumps({field: [text], **({"model": "m"} if field == "input" else {})})
        half = len(content) // 2
        value = await read(content[:half].encode(), content[half:].encode())
        assert body.schema_of(value, SCHEMAS) is schema
        assert value[field] == [text]


def test_a_body_with_two_discriminators_or_none_is_refused() -> None:
    both = {"sentences": ["a"], "input": ["b"]}
    with pytest.raises(InvalidRequestError, match="send one of these fields") as refused:
        body.schema_of(both, SCHEMAS)
    assert "sentences (Smart Embedder) and input (OpenAI)" in str(refused.value)
    assert refused.value.problems
    for neither in ({"texts": ["a"]}, ["sentences"], 7, "input", None):
        assert body.schema_of(neither, SCHEMAS) is None
        assert body.schema_of(neither, SCHEMAS[:1]) is SCHEMAS[0]


async def test_invalid_json_is_refused_with_its_size_and_an_example() -> None:
    for content in (b'{"sentences": ["a"', b"\xff", b"x" * 20_000):
        message = await refusal(content)
        assert f"the body of {len(content)} bytes is not JSON (" in message
        assert '"sentences"' in message
    assert (await refusal(b"")).startswith("the body is empty: send {")
    large = b'["' + b"\\n" * 200_000
    message = await refusal(large)
    assert (
        f"the body of {len(large)} bytes is not JSON (EOF while parsing a string at line 1"
        in message
    )


async def test_too_many_json_values_are_refused_before_the_body_is_whole():
    parts = [b'{"input": [' + b"1," * 1500, b"never read"]
    message = await refusal(*parts)
    assert "more than 1000 values" in message
    assert "check_embedding_ctx_length=False" not in message, "for this service's own API"
    assert "check_embedding_ctx_length=False" in await refusal(*parts, schemas=SCHEMAS[::-1])
    for byte in (b" ", b"\\"):
        assert "bytes beside its texts" in await refusal(byte * 64_002)
    assert "is not JSON" in await refusal(b" " * 64_000)


async def test_token_ids_are_no_values_but_other_numbers_are() -> None:
    """`decode` returns the number of ids."""

    async def decode(value: Any) -> int:
        return len(value.get("input", ()))

    ids = ",".join(["7"] * 20_000).encode()
    for parts in ([b'{"input":[', ids, b"]}"], [b'{"input": [', ids.replace(b",", b"\n, "), b"]}"]):
        assert await read(*parts, decode=decode) == {"input": [7] * 20_000}
    for content in (b'{"sentences":[%s]}' % ids, b'{"input":[7],"dimensions":[%s]}' % ids):
        assert "more than 1000 values" in await refusal(content, decode=decode)
    assert "more than 2400000 numbers" in await refusal(
        b'{"input":[', b"7," * 2_400_002, b"never", decode=decode
    )
    texts = b'{"input":[' + b'"7",' * 1500
    assert "more than 1000 values" in await refusal(texts, b"never read", decode=decode)


async def test_a_body_without_json_type_is_not_read_and_a_disconnect_is_no_bad_body() -> None:
    for headers in ([(b"content-type", b"text/plain")], [(b"content-encoding", b"br")]):
        with pytest.raises(UnsupportedMediaError):
            await read(b'{"sentences": ["a"]}', headers=headers)
    with pytest.raises(ClientGoneError):
        await read(b'{"sentences": [', leaves=True)


def test_max_json_values_leaves_room_for_the_specific_limits() -> None:
    """Sixteen for each text, so that a list of token ids has its specific error."""
    for sentences, passages in ((5000, 10), (10, 5000)):
        settings = Settings(max_sentences_per_request=sentences, max_rerank_passages=passages)
        assert body.max_json_values(settings) == 16 * 5000 + 1024
    least = Settings(max_sentences_per_request=1, max_rerank_passages=1)
    # OpenAI's paths always take 2,048 texts, which may be objects.
    assert body.max_json_values(least) >= 3 * 2048


JSON_TYPE = (b"content-type", b"application/json")
PAGE = (b"origin", b"https://a")
ADVICE = "send JSON, with Content-Type: application/json"
TYPES = {
    "application/json": None,
    "Application/JSON ; charset=UTF-8": None,
    "application/vnd.api+json": None,
    "application/json; charset=latin-1": "the body's charset is latin-1: send JSON in UTF-8",
    "text/json": f"the Content-Type is text/json: {ADVICE}",
    "text/plain; application/json": "the Content-Type is text/plain; application/json",
    "application/jsonx": "the Content-Type is application/jsonx",
    "application/json, text/plain": "the Content-Type is application/json, text/plain",
    "application/json" + " " * 1009: "the Content-Type is application/json: send",
    "application/json" + " " * 1008: None,
    # The parser of `email` would take seconds for these.
    'application/json; a="' + ";" * 60_000: 'the Content-Type is application/json; a=";;;',
    "application/json" + "; a=b" * 10_000: "the Content-Type is application/json; a=b; a=b",
}


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        *(([(b"content-type", value.encode())], message) for value, message in TYPES.items()),
        ([], None),
        ([(b"content-type", b" ")], None),
        ([PAGE], "the request has no Content-Type: send"),
        ([(b"content-type", b" "), PAGE], "the request has no Content-Type: send"),
        ([JSON_TYPE, PAGE], None),
        ([JSON_TYPE, JSON_TYPE], "is application/json, application/json: send"),
        ([(b"content-encoding", b"")], None),
        ([(b"content-encoding", b"identity, ")], None),
        ([(b"content-encoding", b"br")], "Content-Encoding is br: send it uncompressed"),
        (
            [(b"content-encoding", b"identity"), (b"content-encoding", b"GZIP")],
            "Content-Encoding is GZIP: send it uncompressed",
        ),
    ],
    ids=lambda case: str(case)[:60],
)
def test_content_type_must_be_json_in_utf_8_and_present_for_web_pages(headers, message) -> None:
    if message is None:
        body._require_json(Headers(raw=headers))
    else:
        with pytest.raises(UnsupportedMediaError, match=re.escape(message)):
            body._require_json(Headers(raw=headers))


@pytest.mark.parametrize(
    ("model", "name", "sent"),
    [
        (OpenAIEmbeddingRequest, "dimensions", "1" * 20_000),
        (CohereEmbedRequest, "embedding_types", ["float", "a" * 20_000]),
        (EmbeddingRequest, "input_type", ["", "a" * 20_000, ""]),
    ],
)
def test_a_long_string_in_an_option_is_not_converted(model, name, sent) -> None:
    """Pydantic would encode and hash it, which takes 50 ms for 32 MiB."""
    with pytest.raises(InvalidRequestError, match="20000 characters: it takes no text") as raised:
        validate(dict(model.example) | {name: sent}, model)
    assert raised.value.problems[0]["pointer"] == f"/{name}"
    assert not isinstance(raised.value.__context__, ValidationError)
    for size, is_early in ((16_384, False), (16_385, True)):
        with pytest.raises(InvalidRequestError) as raised:
            validate(dict(model.example) | {name: "a" * size}, model)
        assert ("it takes no text" in str(raised.value)) is is_early
    # Texts, names and ignored fields of other APIs may be long.
    long = "a" * 20_000
    (texts,) = model.model_fields.keys() & {"input", "sentences", "texts"}
    read = validate({texts: [long], "model": long}, model)
    assert (read.model, getattr(read, texts)) == (long, [long])
