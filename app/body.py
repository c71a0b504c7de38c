"""Reading a request body: from bytes to a parsed value, within limits.

It must be declared as JSON, because a web page of another origin can make a browser send a POST
without a type, or of some other types, without asking the service first.

The number of JSON values is limited before parsing, because a few megabytes can hold millions of
values, which take a parser seconds and gigabytes. Large bodies are parsed one at a time, and the
event loop runs everything else between two of them. A byte order mark, which some programs on
Windows write, is ignored, as RFC 8259 allows.
"""

import asyncio
import math
from codecs import BOM_UTF8
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from functools import lru_cache
from typing import Any

from fastapi import Request
from pydantic import Discriminator, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from app.context import NATIVE
from app.error_responses import invalid_json_error
from app.errors import ClientGoneError, UnsupportedMediaError
from app.headers import read_preference
from app.logs import escape_text
from app.schemas import OPENAI_TEXTS, RequestModel, invalid_body
from app.settings import Settings
from smart_embedder.errors import InvalidRequestError
from smart_embedder.surrogates import parse_with_surrogates

_VALUES_BESIDES_TEXTS = 1024
_VALUES_PER_TEXT = 16
# Of {"text": "..."}: a brace, a colon and a comma.
_VALUES_PER_OBJECT = 3
_MAX_QUOTED = 60
# Parsing fewer bytes takes less than a millisecond, whatever is in them.
_LARGE_BODY = 16_384
# Names, numbers, brackets and indentation: a valid body has much fewer for each value.
_MAX_BYTES_PER_VALUE = 64
TEXTS_ADVICE = (
    "send texts and no token ids (in LangChain's OpenAIEmbeddings set "
    "check_embedding_ctx_length=False)"
)
_ADVICE = "send JSON, with Content-Type: application/json"
# ASCII is a subset of UTF-8.
_CHARSETS = {"utf-8", "utf8", "us-ascii", "ascii"}


def max_json_values(settings: Settings) -> int:
    """How many values a body may hold: more than a valid one, so that its error can be specific."""
    texts = max(settings.max_sentences_per_request, settings.max_rerank_passages)
    return _VALUES_BESIDES_TEXTS + max(_VALUES_PER_TEXT * texts, _VALUES_PER_OBJECT * OPENAI_TEXTS)


async def read_json(
    request: Request,
    schemas: Sequence[type[RequestModel]],
    max_values: int,
    lock: asyncio.Lock,
    replaced: list[str],
) -> Any:
    """Read the body and parse it; errors show an example of the first of `schemas`.

    A body of more than `max_values` values is refused before it is read whole; of large ones only
    the holder of `lock` is parsed. Raises `UnsupportedMediaError`, `InvalidRequestError` or
    `ClientGoneError`, which never quote the client's texts. Appends to `replaced` as `parse_json`.
    """
    _require_json(request.headers)
    chunks, schema = list[bytes](), schemas[0]
    counter = JsonValueCounter(max_values, _MAX_BYTES_PER_VALUE * max_values)
    try:
        async for chunk in request.stream():
            counter.feed(chunk)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGoneError("the client left before its request was complete") from None
    except InvalidRequestError as error:
        if schema.dialect is NATIVE:
            raise
        # Lists of token ids are the usual reason.
        raise InvalidRequestError(f"{error}; {TEXTS_ADVICE}", error.problems) from None
    if sum(map(len, chunks)) < _LARGE_BODY:
        return parse_json(b"".join(chunks), schema, replaced)
    async with lock:
        # Everything else runs once before the next large body is joined and parsed.
        await asyncio.sleep(0)
        return parse_json(b"".join(chunks), schema, replaced)


def schema_of(value: Any, schemas: Sequence[type[RequestModel]]) -> type[RequestModel] | None:
    """The one of `schemas` that a parsed body has the field of; None for no field of several.

    Raises `InvalidRequestError` for a body with the fields of several.
    """
    if len(schemas) == 1:
        return schemas[0]
    fields = value if isinstance(value, dict) else {}
    matching = [schema for schema in schemas if schema.discriminator in fields]
    if len(matching) > 1:
        raise invalid_body(
            f"the body has the fields of several APIs, {list_discriminators(matching)}: "
            "send one of these fields"
        )
    return matching[0] if matching else None


def list_discriminators(schemas: Sequence[type[RequestModel]]) -> str:
    """Name the fields that tell these schemas apart, and their dialects, for an error."""
    return " and ".join(f"{schema.discriminator} ({schema.dialect.name})" for schema in schemas)


@dataclass(frozen=True, slots=True)
class DescribedBy:
    """Describes a union in /openapi.json as the body with this field; others have other paths."""

    field: str

    def __get_pydantic_json_schema__(
        self, union: CoreSchema, describe: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The description of that body."""
        return describe(union["choices"][self.field])


def discriminate_by(*fields: str) -> Discriminator:
    """Tells the bodies of a union by the first of these fields that they have; else the first."""

    def tag(value: Any) -> str:
        return next(
            (each for each in fields if isinstance(value, dict) and each in value), fields[0]
        )

    return Discriminator(tag)


def parse_json(
    content: bytes, schema: type[RequestModel], replaced: list[str] | None = None
) -> Any:
    """The value in some JSON; raises an `InvalidRequestError` that shows an example of `schema`.

    Lone surrogates are replaced; pointers to the strings that had some are appended to `replaced`.
    """
    content = content.removeprefix(BOM_UTF8)
    try:
        return from_json(content)
    except ValueError as error:
        with suppress(ValueError):
            return parse_with_surrogates(content, [] if replaced is None else replaced)
        raise invalid_json_error(str(error), schema, len(content)) from None


class JsonValueCounter:
    """Counts commas, colons and opening brackets outside strings, chunk by chunk.

    `feed` raises `InvalidRequestError` at the chunk that exceeds `max_values`, or `max_outside`
    bytes outside strings. Whether the text is valid JSON is left to the parser.
    """

    def __init__(self, max_values: int, max_outside: float = math.inf) -> None:
        self._max_values = max_values
        self._max_outside = max_outside
        self._count = self._outside = 0
        self._in_string = False
        self._carry = b""

    def feed(self, chunk: bytes) -> None:
        """Count the values in the next part of the body."""
        if self._carry or b"\\" in chunk:  # Without, it is ten times as quick.
            # Of the same length, without escaped backslashes and quotation marks; half an escape
            # waits.
            chunk = (self._carry + chunk).replace(b"\\\\", b"__")
            self._carry = b"\\" if chunk.endswith(b"\\") else b""
            chunk = chunk.removesuffix(b"\\").replace(b'\\"', b"__")
        # No quotation mark is escaped any more, so every second part lies inside a string.
        max_parts = 2 * (self._max_values - self._count) + 4
        parts = chunk.split(b'"', max_parts)
        # Joined first: a call for each part would take 2 ms for a request of 1,024 texts.
        outside = b"".join(parts[1::2] if self._in_string else parts[::2])
        self._count += sum(map(outside.count, (b",", b":", b"[", b"{")))
        self._outside += len(outside)
        self._in_string ^= len(parts) % 2 == 0
        if self._count > self._max_values or len(parts) > max_parts:
            raise invalid_body(
                f"the body holds more than {self._max_values} values, more than any request needs "
                "that MAX_SENTENCES_PER_REQUEST and MAX_RERANK_PASSAGES allow"
            )
        if self._outside > self._max_outside:
            raise invalid_body(
                f"the body holds more than {self._max_outside} bytes beside its texts, more than "
                "any request needs"
            )


def _require_json(headers: Headers) -> None:
    """Raise `UnsupportedMediaError` unless the headers declare JSON in UTF-8, not compressed.

    A browser's request names its origin; other programs may leave the type out.
    """
    values = headers.getlist("content-type")
    is_typed = any(map(str.strip, values))
    if not is_typed and "origin" in headers:
        raise UnsupportedMediaError(f"the request has no Content-Type: {_ADVICE}")
    if is_typed:
        # Empty where it is too long: the time to parse it grows with the square of its length.
        value = read_preference(headers, "content-type")
        kind, _, subtype = value.partition(";")[0].strip().lower().partition("/")
        is_json = kind == "application" and (subtype == "json" or subtype.endswith("+json"))
        if len(values) > 1 or not is_json:
            sent = _quote(", ".join(values))
            raise UnsupportedMediaError(f"the Content-Type is {sent}: {_ADVICE}")
        charset = _charset_of(value)
        if charset.strip().lower() not in _CHARSETS:
            raise UnsupportedMediaError(
                f"the body's charset is {_quote(charset)}: send JSON in UTF-8, as it always is"
            )
    check_encoding(headers)


@lru_cache(maxsize=256)  # Clients send the same header with every request.
def _charset_of(content_type: str) -> str:
    message = Message()
    message["Content-Type"] = content_type
    return str(message.get_param("charset", "utf-8"))


def check_encoding(headers: Headers) -> None:
    """Raise `UnsupportedMediaError` for a compressed body."""
    for encoding in ",".join(headers.getlist("content-encoding")).split(","):
        if encoding.strip().lower() not in {"", "identity"}:
            raise UnsupportedMediaError(
                f"the body's Content-Encoding is {_quote(encoding)}: send it as it is"
            )


def _quote(text: str) -> str:
    return escape_text(text.strip(), _MAX_QUOTED)
