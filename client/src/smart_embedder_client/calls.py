"""The requests of both clients, and their retries."""

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from smart_embedder_client import safetensors
from smart_embedder_client.answers import (
    Embeddings,
    Health,
    Ranking,
    Tokenized,
    read_embeddings,
    read_health,
    read_ranking,
    read_tokenized,
)
from smart_embedder_client.errors import (
    CONNECTION_LOST,
    INVALID_INPUT,
    UNREACHABLE,
    SmartEmbedderError,
)

_BUSY = (429, 503)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
# Spreads the retries of clients that were refused at the same time.
_JITTER = 0.25
URL_VARIABLE, TOKEN_VARIABLE = "SMART_EMBEDDER_URL", "SMART_EMBEDDER_TOKEN"
DEFAULT_URL = "http://127.0.0.1:8000"
_PORTS = range(65_536)
_CONNECT_SECONDS = 5.0
# The service's limit of texts in a request; the limit of bytes bounds the time that one takes.
_MAX_TEXTS, _MAX_BYTES = 1024, 524_288
# A response of the service has at most 36 MiB. With a vector for each token, a byte of text makes
# about a thousand bytes of it, and MUVERA adds 40 KiB for each text.
_MAX_TOKEN_VECTOR_BYTES, _MAX_MUVERA_TEXTS = 16_384, 64
# Compression saves little on vectors.
_UNCOMPRESSED = {"Accept-Encoding": "identity"}
Result = TypeVar("Result")


@dataclass(slots=True)
class Retries:
    """The retry policy and state of one request.

    A request is sent again after 429 and 503 with a Retry-After, no earlier than the header says,
    and after a failure to connect, with pauses that double. After any other error it would fail
    again or be computed twice. A page of a stream (`resumes`) is also sent again after a lost
    connection.
    """

    max_retries: int
    max_wait: float
    resumes: bool = False
    _count: int = 0
    _waited: float = 0.0

    def pause_after(self, error: SmartEmbedderError) -> float:
        """Return the seconds to wait before the next try; raise `error` if there is none."""
        pause = error.retry_after if error.status in _BUSY else None
        if error.code == UNREACHABLE or (self.resumes and error.code == CONNECTION_LOST):
            pause = min(_FIRST_PAUSE * 2.0**self._count, _LONGEST_PAUSE)
        if pause is None or self._count >= self.max_retries or self._waited + pause > self.max_wait:
            raise error
        pause = min(pause * random.uniform(1, 1 + _JITTER), self.max_wait - self._waited)  # noqa: S311 - no secret
        self._count += 1
        self._waited += pause
        return pause


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """One request, and the function that parses its response."""

    method: str
    path: str
    read: Callable[[httpx.Response], Result]
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def embed_calls(
    texts: Sequence[str], options: Mapping[str, Any], priority: int | None
) -> Iterator[tuple[int, Call[Embeddings]]]:
    """Yield the requests for the vectors of `texts`, with the number of texts in each."""
    options = with_defaults(options)
    fields, headers = split_vector_space(options)
    headers |= {"Accept": safetensors.MEDIA_TYPE} | _priority_header(priority)
    for part in _split_texts(_check_texts(texts), options):
        read = partial(read_embeddings, texts=part, options=options)
        body = {"sentences": part, **fields}
        yield len(part), Call("POST", "/embeddings/", read, body, headers)


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out ColBERT vectors by default: they would be most of the response."""
    return {"return_colbert": False, **options}


def split_vector_space(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of the body, and `if_vector_space` as a header."""
    fields = dict(options)
    ids = fields.pop("if_vector_space", None)
    if not ids:
        return fields, {}
    if isinstance(ids, str):
        raise TypeError("if_vector_space is a string: put it into a list")
    value = ", ".join(ids)
    if not (value.isascii() and value.isprintable()):
        raise SmartEmbedderError(f"{value!r} are no ids of vector spaces", INVALID_INPUT)
    return fields, {"If-Vector-Space": value}


def with_input_type(options: Mapping[str, Any], input_type: str) -> dict[str, Any]:
    """Add the input type to the options; raise `TypeError` if they have one."""
    if "input_type" in options:
        raise TypeError(f"the input_type of this method is {input_type}: leave the option out")
    return {**options, "input_type": input_type}


def _split_texts(texts: list[str], options: Mapping[str, Any]) -> Iterator[list[str]]:
    """Split texts into lists that fit into one request; yield at least one list."""
    has_muvera = options.get("muvera") is not None
    has_token_vectors = options["return_colbert"] or has_muvera
    max_bytes = _MAX_TOKEN_VECTOR_BYTES if has_token_vectors else _MAX_BYTES
    max_texts = _MAX_MUVERA_TEXTS if has_muvera else _MAX_TEXTS
    begin = size = 0
    for end, text in enumerate(texts):
        text_size = len(text.encode("utf-8", "surrogatepass"))
        if end > begin and (size + text_size > max_bytes or end - begin == max_texts):
            yield texts[begin:end]
            begin, size = end, 0
        size += text_size
    yield texts[begin:]


def rerank_call(
    query: str, passages: Sequence[str], options: Mapping[str, Any], priority: int | None
) -> Call[Ranking]:
    """Build the request that ranks `passages`."""
    passages = _check_texts(passages)
    (query,) = _check_texts([query])
    read = partial(read_ranking, passages=passages, options=options)
    fields, headers = split_vector_space(options)
    body = {"query": query, "passages": passages, **fields}
    headers |= _priority_header(priority)
    return Call("POST", "/rerank", read, body, headers)


def tokenize_call(texts: Sequence[str], model: str | None) -> Call[list[Tokenized]]:
    """Build the request for the tokens of each text."""
    texts = _check_texts(texts)
    path = "/tokenize" if model is None else f"/models/{quote(model, errors='replace')}/tokenize"
    body = {"inputs": texts, "add_special_tokens": False}
    return Call("POST", path, partial(read_tokenized, texts=texts), body)


def health_call() -> Call[Health]:
    """Build the request for the state of the service."""
    return Call("GET", "/health", read_health)


@dataclass(frozen=True, slots=True)
class Service:
    """The address of a service, and the settings with which requests are sent to it."""

    url: str
    token: str | None
    timeout: float
    max_retries: int
    max_wait: float

    def request(self, call: Call[Any]) -> dict[str, Any]:
        """Return the arguments of httpx's `build_request`."""
        headers = {} if call.body is None else {"Content-Type": "application/json"}
        token = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        connect = min(self.timeout, _CONNECT_SECONDS)
        return {
            "method": call.method,
            "url": self.url + call.path,
            "content": None if call.body is None else _to_json(call.body),
            "headers": {**headers, **call.headers, **_UNCOMPRESSED, **token},
            # pool=None: a request that waits for a free connection has not failed.
            "timeout": httpx.Timeout(self.timeout, connect=connect, pool=None),
        }


def service_at(
    url: str | None, token: str | None, timeout: float, max_retries: int, max_wait: float
) -> Service:
    """Check the arguments of a new client; raise `ValueError` for a wrong address or token."""
    if url is None and token is None:
        # The token belongs to the address in the environment: it is sent to no other one.
        token = os.environ.get(TOKEN_VARIABLE)
    token = None if token is None else check_token(token)
    return Service(resolve_address(url), token, timeout, max_retries, max_wait)


def check_token(token: str) -> str:
    """Return the token; raise `ValueError`, without the token in it, if no header can hold it."""
    if token.isascii() and token.isprintable():
        return token
    raise ValueError("the token has a character that no header can have, such as a line end")


def resolve_address(url: str | None) -> str:
    """Return `url`, else SMART_EMBEDDER_URL, else port 8000 of this machine.

    Raises `ValueError` if it is not an address of HTTP.
    """
    address = url if url is not None else os.environ.get(URL_VARIABLE) or DEFAULT_URL
    try:
        parsed = httpx.URL(address)
        is_valid = parsed.scheme in ("http", "https") and bool(parsed.host)
        is_valid &= (parsed.port or 0) in _PORTS and not parsed.query and not parsed.fragment
    except (httpx.InvalidURL, TypeError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"{address!r} is no address such as {DEFAULT_URL}")
    if "v1" in parsed.path.split("/"):
        raise ValueError(
            f"the address {address} has /v1, which OpenAI's clients need and this one does not: "
            "leave it out"
        )
    return address.rstrip("/")


def _check_texts(texts: Sequence[str]) -> list[str]:
    """Return the texts as a list; raise `SmartEmbedderError` if one is not a string."""
    if isinstance(texts, str):
        raise TypeError("the texts are one string: put it into a list")
    texts = list(texts)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            detail = f"the text at index {index} is {type(text).__name__} and no string"
            raise SmartEmbedderError(detail, INVALID_INPUT)
    return texts


def _to_json(body: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode()
    except UnicodeEncodeError as error:
        before = text[max(error.start - 40, 0) : error.start]
        detail = f"a text has half of a surrogate pair, which cannot be sent, after {before!r}"
        raise SmartEmbedderError(detail, INVALID_INPUT) from error
    except (RecursionError, TypeError, ValueError) as error:
        raise SmartEmbedderError(f"the request is no JSON: {error}", INVALID_INPUT) from error


def _priority_header(priority: int | None) -> dict[str, str]:
    return {} if priority is None else {"Priority": f"u={priority}"}
