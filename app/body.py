"""Reads and parses the body of a request, within limits.

The body must be declared as JSON: a web page of another origin can have a browser send a POST with
no content type, or with some other types, without a preflight request.

The JSON values are counted before parsing, because a few megabytes can hold millions of values,
which would take a parser seconds and gigabytes. Large bodies are parsed one at a time, and the
event loop runs other work between two of them. A byte order mark, which some programs on Windows
write, is ignored, as RFC 8259 allows.
"""

import asyncio
import math
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Sequence
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
from app.message_pack import MESSAGE_PACK, TooManyValuesError, unpack
from app.schemas import OPENAI_TEXTS, RequestModel, invalid_body
from app.settings import Settings
from smart_embedder.errors import InvalidRequestError
from smart_embedder.surrogates import parse_with_surrogates

_VALUES_BESIDES_TEXTS = 1024
_VALUES_PER_TEXT = 16
# The brace, the colon and the comma of {"text": "..."}.
_VALUES_PER_OBJECT = 3
_MAX_QUOTED = 60
# A smaller body is parsed in less than a millisecond, whatever its content.
_LARGE_BODY = 16_384
# For names, numbers, brackets and indentation; a valid body has much fewer.
_MAX_BYTES_PER_VALUE = 64
# These take the parser a tenth of a second, and 16 MiB of body have few more.
MAX_TOKEN_IDS = 2_400_000
TEXTS_ADVICE = (
    "send texts and no token ids (in LangChain's OpenAIEmbeddings set "
    "check_embedding_ctx_length=False)"
)
_DIGITS = bytes.maketrans(b"0123456789", b"0" * 10)
_ADVICE = "send JSON, with Content-Type: application/json"
# ASCII is a subset of UTF-8.
_CHARSETS = {"utf-8", "utf8", "us-ascii", "ascii"}


def max_json_values(settings: Settings) -> int:
    """The limit of JSON values in a body: high enough for the specific errors of longer lists."""
    texts = max(settings.max_sentences_per_request, settings.max_rerank_passages)
    return _VALUES_BESIDES_TEXTS + max(_VALUES_PER_TEXT * texts, _VALUES_PER_OBJECT * OPENAI_TEXTS)


async def read_body(
    request: Request,
    schemas: Sequence[type[RequestModel]],
    max_values: int,
    lock: asyncio.Lock,
    replaced: list[str],
    *,
    decode: Callable[[Any], Awaitable[int]] | None = None,
) -> Any:
    """Read the body and parse JSON, or MessagePack if the first of `schemas` reads it.

    Errors show an example of that schema. A body of more than `max_values` values is refused before
    it is read whole. A large body is parsed with the `lock` held. Lone surrogates are replaced as
    in `parse_json`. `decode` replaces token ids in the parsed body and returns their number, which
    does not count as values. Raises `UnsupportedMediaError`, `InvalidRequestError` or
    `ClientGoneError`, which never quote the client's texts.
    """
    chunks, schema = list[bytes](), schemas[0]
    is_packed = schema.reads_message_pack and _is_message_pack(request.headers)
    check_headers = check_encoding if is_packed else _require_json
    check_headers(request.headers)
    max_outside = math.inf if decode else _MAX_BYTES_PER_VALUE * max_values
    counter = JsonValueCounter(max_values, max_outside, without_integers=decode is not None)
    try:
        async for chunk in request.stream():
            if not is_packed:
                counter.feed(chunk)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGoneError("the client left before its request was complete") from None
    except InvalidRequestError as error:
        if schema.dialect is NATIVE or decode is not None:
            raise
        # Usually the body holds lists of token ids.
        raise InvalidRequestError(f"{error}; {TEXTS_ADVICE}", error.problems) from None

    async def parse() -> Any:
        content = b"".join(chunks)
        if is_packed:
            return _parse_message_pack(content, max_values)
        value = parse_json(content, schema, replaced)
        if decode is not None:
            # Let other work run before the ids are decoded.
            await asyncio.sleep(0)
            counter.require_few_integers(besides=await decode(value))
        return value

    if sum(map(len, chunks)) < _LARGE_BODY and not is_packed:
        return await parse()
    async with lock:
        # Let other work run before the next large body is joined and parsed.
        await asyncio.sleep(0)
        return await parse()


def schema_of(value: Any, schemas: Sequence[type[RequestModel]]) -> type[RequestModel] | None:
    """Find the schema whose discriminator the parsed body has, or the only schema.

    Returns None if the body has none of the discriminators. Raises `InvalidRequestError` if it has
    several.
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
    """Describes a union in /openapi.json as its schema with this field; others have own paths."""

    field: str

    def __get_pydantic_json_schema__(
        self, union: CoreSchema, describe: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The description of that schema."""
        return describe(union["choices"][self.field])


def discriminate_by(*fields: str) -> Discriminator:
    """Tell the bodies of a union apart by the first of `fields` that they have.

    A body without any of them is validated by the schema of the first field.
    """

    def find_tag(value: Any) -> str:
        return next(
            (field for field in fields if isinstance(value, dict) and field in value), fields[0]
        )

    return Discriminator(find_tag)


def parse_json(
    content: bytes, schema: type[RequestModel], replaced: list[str] | None = None
) -> Any:
    """Parse JSON; raise an `InvalidRequestError` that shows an example of `schema`.

    Lone surrogates are read as U+FFFD, and pointers to their strings are appended to `replaced`.
    """
    content = content.removeprefix(BOM_UTF8)
    try:
        return from_json(content)
    except ValueError as error:
        with suppress(ValueError):
            return parse_with_surrogates(content, [] if replaced is None else replaced)
        raise invalid_json_error(str(error), schema, len(content)) from None


def _parse_message_pack(content: bytes, max_values: int) -> Any:
    """Parse MessagePack, and count its values, which takes longer than to parse JSON."""
    try:
        return unpack(content, max_values)
    except TooManyValuesError:
        raise _too_many_values_error(max_values) from None
    except ValueError as error:
        message = f"the body of {len(content)} bytes is not MessagePack ({error})"
        raise invalid_body(message) from None


class JsonValueCounter:
    """Counts commas, colons and opening brackets outside strings, chunk by chunk.

    `feed` raises `InvalidRequestError` at the chunk that exceeds `max_values`, or `max_outside`
    bytes outside strings. Only the parser checks that the text is valid JSON. Most whole numbers in
    lists are counted apart with `without_integers`, and `require_few_integers` limits them later.
    """

    def __init__(
        self, max_values: int, max_outside: float = math.inf, *, without_integers: bool = False
    ) -> None:
        self._max_values = max_values
        self._max_outside = max_outside
        self._without_integers = without_integers
        self._count = self._outside = self._integers = 0
        self._in_string = False
        self._carry = b""

    def feed(self, chunk: bytes) -> None:
        """Count the values in the next part of the body."""
        if (
            self._carry or b"\\" in chunk
        ):  # A chunk without backslashes is counted ten times faster.
            # Replace escaped backslashes and quotation marks, and keep the length. An escape that
            # the end of the chunk cuts is carried to the next.
            chunk = (self._carry + chunk).replace(b"\\\\", b"__")
            self._carry = b"\\" if chunk.endswith(b"\\") else b""
            chunk = chunk.removesuffix(b"\\").replace(b'\\"', b"__")
        # No quotation mark is escaped any more, so every second part is inside a string.
        max_parts = 2 * (self._max_values - self._count) + 4
        parts = chunk.split(b'"', max_parts)
        # Joined first, because a call for each part would take 2 ms for a request of 1,024 texts.
        outside = b"".join(parts[1::2] if self._in_string else parts[::2])
        self._count += sum(map(outside.count, (b",", b":", b"[", b"{")))
        if self._without_integers:
            # After translation, every digit is 0.
            integers = outside.translate(_DIGITS, b" \t\r\n").count(b",0")
            self._integers += integers
            self._count -= integers
            if self._integers > MAX_TOKEN_IDS:
                raise invalid_body(
                    f"the body holds more than {MAX_TOKEN_IDS} numbers, the most token ids of a "
                    "request: send them in several requests"
                )
        self._outside += len(outside)
        self._in_string ^= len(parts) % 2 == 0
        if self._count > self._max_values or len(parts) > max_parts:
            raise _too_many_values_error(self._max_values)
        if self._outside > self._max_outside:
            raise invalid_body(
                f"the body holds more than {self._max_outside} bytes beside its texts, more than "
                "any request needs"
            )

    def require_few_integers(self, besides: int) -> None:
        """Raise `InvalidRequestError` for too many whole numbers; `besides` of them are allowed."""
        if self._integers - besides > self._max_values:
            raise _too_many_values_error(self._max_values)


def _too_many_values_error(max_values: int) -> InvalidRequestError:
    return invalid_body(
        f"the body holds more than {max_values} values, more than any request needs that "
        "MAX_SENTENCES_PER_REQUEST and MAX_RERANK_PASSAGES allow"
    )


def _is_message_pack(headers: Headers) -> bool:
    """Whether the headers declare MessagePack, under either of its names."""
    kinds = [value.partition(";")[0].strip().lower() for value in headers.getlist("content-type")]
    return kinds in ([MESSAGE_PACK], ["application/x-msgpack"])


def _require_json(headers: Headers) -> None:
    """Raise `UnsupportedMediaError` unless the headers declare uncompressed JSON in UTF-8.

    Only clients without an Origin, which are not web pages, may leave out the type.
    """
    values = headers.getlist("content-type")
    is_typed = any(map(str.strip, values))
    if not is_typed and "origin" in headers:
        raise UnsupportedMediaError(f"the request has no Content-Type: {_ADVICE}")
    if is_typed:
        # Empty if it is too long: the time to parse it grows with the square of its length.
        value = read_preference(headers, "content-type")
        kind, _, subtype = value.partition(";")[0].strip().lower().partition("/")
        is_json = kind == "application" and (subtype == "json" or subtype.endswith("+json"))
        if len(values) > 1 or not is_json:
            sent = _quote(", ".join(values))
            raise UnsupportedMediaError(f"the Content-Type is {sent}: {_ADVICE}")
        charset = _charset_of(value)
        if charset.strip().lower() not in _CHARSETS:
            raise UnsupportedMediaError(
                f"the body's charset is {_quote(charset)}: send JSON in UTF-8"
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
                f"the body's Content-Encoding is {_quote(encoding)}: send it uncompressed"
            )


def _quote(text: str) -> str:
    return escape_text(text.strip(), _MAX_QUOTED)
