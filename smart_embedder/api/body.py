"""Reading a request body: from bytes to a validated model, within limits.

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
from email.message import Message
from functools import lru_cache
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from smart_embedder.api.context import NATIVE, Operation, RequestContext, context_of, preference
from smart_embedder.api.errors import as_invalid_request, not_json
from smart_embedder.api.schemas import OPENAI_TEXTS, RequestModel, invalid_body
from smart_embedder.errors import ClientGoneError, InvalidRequestError, UnsupportedMediaError
from smart_embedder.observability.logs import escape_text
from smart_embedder.settings.service import Settings
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


Model = TypeVar("Model", bound=RequestModel)


async def read_body(
    request: Request, max_values: int, lock: asyncio.Lock
) -> tuple[Operation, RequestModel]:
    """Read the body and validate it for the one of its path's operations that it asks for.

    Both are returned, and the operation is recorded in the request's context. A body of more than
    `max_values` values is refused before it is read whole; of large ones only the holder of `lock`
    is parsed. Raises `UnsupportedMediaError`, `InvalidRequestError` or `ClientGoneError`, which
    never quote the client's texts.
    """
    _require_json(request.headers)
    context, chunks = context_of(request.scope), list[bytes]()
    first = context.operations[0]
    counter = JsonValueCounter(max_values, _MAX_BYTES_PER_VALUE * max_values)
    try:
        async for chunk in request.stream():
            counter.feed(chunk)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGoneError("the client left before its request was complete") from None
    except InvalidRequestError as error:
        if first.dialect is NATIVE:
            raise
        # Lists of token ids are the usual reason.
        raise InvalidRequestError(f"{error}; {TEXTS_ADVICE}", error.problems) from None
    if sum(map(len, chunks)) < _LARGE_BODY:
        return _validate_one(parse_json(b"".join(chunks), first.schema, context.replaced), context)
    async with lock:
        # Everything else runs once before the next large body is joined and parsed.
        await asyncio.sleep(0)
        return _validate_one(parse_json(b"".join(chunks), first.schema, context.replaced), context)


def _validate_one(value: Any, context: RequestContext) -> tuple[Operation, RequestModel]:
    operations = context.operations
    fit = [each for each in operations if each.field in value] if isinstance(value, dict) else []
    if len(fit) > 1:
        raise invalid_body(
            f"the body has the fields of several APIs, {_named(fit)}: send one of these fields"
        )
    operation = fit[0] if fit else operations[0]
    is_told = bool(fit) or len(operations) == 1
    if is_told:
        context.dialects, context.endpoint = (operation.dialect,), operation.endpoint
    try:
        return operation, validate(value, operation.schema)
    except InvalidRequestError as error:
        if is_told or not isinstance(value, dict):
            raise
        message = f"{error}; other APIs on this path are told by {_named(operations[1:])}"
        raise InvalidRequestError(message, error.problems) from None


def _named(operations: Sequence[Operation]) -> str:
    return " and ".join(f"{each.field} ({each.dialect.name})" for each in operations)


def validate(value: Any, schema: type[Model], *, strict: bool | None = None) -> Model:
    """A parsed value as `schema`; raises an `InvalidRequestError` that says what is wrong.

    `strict` says whether types are not converted, where the schema's own word shall not count.
    """
    try:
        return schema.model_validate(value, strict=strict)
    except ValidationError as error:
        raise as_invalid_request(error, schema) from None


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
        raise not_json(str(error), schema, len(content)) from None


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
        value = preference(headers, "content-type")
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
