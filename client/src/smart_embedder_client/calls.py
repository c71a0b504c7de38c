"""The requests of both clients: what is sent, and when it is tried again."""

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from smart_embedder_client import limits, safetensors
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
from smart_embedder_client.limits import Limits

_BUSY = (429, 503)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
# Random, so that clients that were refused together do not return together.
_JITTER = 0.25
URL_VARIABLE, TOKEN_VARIABLE = "SMART_EMBEDDER_URL", "SMART_EMBEDDER_TOKEN"
DEFAULT_URL = "http://127.0.0.1:8000"
_PORTS = range(65_536)
_CONNECT_SECONDS = 5.0
# The service takes as many texts in one request; their bytes bound the time of one.
_MOST_TEXTS, _MOST_BYTES = 1024, 524_288
# Where a vector of each token is made, an answer may hold no more than 36 MiB: a byte of text then
# makes some thousand bytes, and MUVERA adds 40 KiB for each text.
_MOST_TOKEN_VECTOR_BYTES, _MOST_MUVERA_TEXTS = 16_384, 64
# Compression hardly makes vectors smaller, and a compressed answer hides its size.
_UNCOMPRESSED = {"Accept-Encoding": "identity"}
Answer = TypeVar("Answer")


@dataclass(slots=True)
class Retries:
    """The remaining tries of one request.

    A request is sent again after 429 and 503 with a Retry-After, no earlier than that says, and
    after a failure to connect, with pauses that double. After any other error it would fail again,
    or be computed twice. A page of a stream `resumes` it: it is sent again after a lost connection,
    too.
    """

    max_retries: int
    max_wait: float
    resumes: bool = False
    _done: int = 0
    _waited: float = 0.0

    def pause_after(self, error: SmartEmbedderError) -> float:
        """Seconds to wait before the next try; raises `error` if there is none."""
        pause = error.retry_after if error.status in _BUSY else None
        if error.code == UNREACHABLE or (self.resumes and error.code == CONNECTION_LOST):
            pause = min(_FIRST_PAUSE * 2.0**self._done, _LONGEST_PAUSE)
        if pause is None or self._done >= self.max_retries or self._waited + pause > self.max_wait:
            raise error
        pause = min(pause * random.uniform(1, 1 + _JITTER), self.max_wait - self._waited)  # noqa: S311 - no secret
        self._done += 1
        self._waited += pause
        return pause


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One request, how large its answer may be, and the function that reads it."""

    method: str
    path: str
    limits: Limits
    read: Callable[[httpx.Response], Answer]
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def embed_calls(
    texts: Sequence[str], options: Mapping[str, Any], priority: int | None
) -> Iterator[tuple[int, Call[Embeddings]]]:
    """The requests for the vectors of `texts`, and how many each is for."""
    options = with_defaults(options)
    fields, headers = split_space(options)
    headers |= {"Accept": safetensors.MEDIA_TYPE} | _priority(priority)
    for part in _parts(_texts(texts), options):
        most = limits.of_vectors(part, options)
        read = partial(read_embeddings, texts=part, options=options)
        body = {"sentences": part, **fields}
        yield len(part), Call("POST", "/embeddings/", most, read, body, headers)


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the client's own default: no ColBERT vectors, most of an answer's bytes."""
    return {"return_colbert": False, **options}


def split_space(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The options that are fields, and `if_vector_space` as a header: an older service skips it."""
    fields = dict(options)
    ids = fields.pop("if_vector_space", None)
    if not ids:
        return fields, {}
    if isinstance(ids, str):
        raise TypeError("one string is no list of ids: put it into a list")
    value = ", ".join(ids)
    if not (value.isascii() and value.isprintable()):
        raise SmartEmbedderError(f"{value!r} are no ids of vector spaces", INVALID_INPUT)
    return fields, {"If-Vector-Space": value}


def with_input_type(options: Mapping[str, Any], input_type: str) -> dict[str, Any]:
    """The options for a query or for documents."""
    if "input_type" in options:
        raise TypeError(f"the input_type of this method is {input_type}: leave the option out")
    return {**options, "input_type": input_type}


def _parts(texts: list[str], options: Mapping[str, Any]) -> Iterator[list[str]]:
    """The texts in lists that one request takes; at least one."""
    with_muvera = options.get("muvera") is not None
    of_tokens = options["return_colbert"] or with_muvera
    most_bytes = _MOST_TOKEN_VECTOR_BYTES if of_tokens else _MOST_BYTES
    most_texts = _MOST_MUVERA_TEXTS if with_muvera else _MOST_TEXTS
    begin = size = 0
    for end, text in enumerate(texts):
        of_text = len(text.encode("utf-8", "surrogatepass"))
        if end > begin and (size + of_text > most_bytes or end - begin == most_texts):
            yield texts[begin:end]
            begin, size = end, 0
        size += of_text
    yield texts[begin:]


def rerank_call(
    query: str, passages: Sequence[str], options: Mapping[str, Any], priority: int | None
) -> Call[Ranking]:
    """The request for the order of `passages`."""
    sent = _texts(passages)
    (query,) = _texts([query])
    read = partial(read_ranking, query=query, passages=sent, options=options)
    fields, headers = split_space(options)
    body = {"query": query, "passages": sent, **fields}
    most = limits.of_ranking(query, sent)
    return Call("POST", "/rerank", most, read, body, headers | _priority(priority))


def tokenize_call(texts: Sequence[str], model: str | None) -> Call[list[Tokenized]]:
    """The request for the tokens of each text."""
    sent = _texts(texts)
    path = "/tokenize" if model is None else f"/models/{quote(model, errors='replace')}/tokenize"
    body = {"inputs": sent, "add_special_tokens": False}
    return Call("POST", path, limits.of_tokens(sent), partial(read_tokenized, texts=sent), body)


def health_call() -> Call[Health]:
    """The request for the state of the service."""
    return Call("GET", "/health", limits.SMALL, read_health)


@dataclass(frozen=True, slots=True)
class Service:
    """The service's address, and how both clients send requests to it."""

    url: str
    token: str | None
    timeout: float
    max_retries: int
    max_wait: float

    def request(self, call: Call[Any]) -> dict[str, Any]:
        """The arguments of httpx' `build_request`."""
        headers = {} if call.body is None else {"Content-Type": "application/json"}
        token = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        connect = min(self.timeout, _CONNECT_SECONDS)
        return {
            "method": call.method,
            "url": self.url + call.path,
            "content": None if call.body is None else _as_json(call.body),
            "headers": {**headers, **call.headers, **_UNCOMPRESSED, **token},
            # No limit of the wait for a connection: many requests at once have not failed.
            "timeout": httpx.Timeout(self.timeout, connect=connect, pool=None),
        }


def service_at(
    url: str | None, token: str | None, timeout: float, max_retries: int, max_wait: float
) -> Service:
    """The service of a new client; raises `ValueError` if the address or the token is none."""
    if url is None and token is None:
        # It is for the service that the environment names, and for no other.
        token = os.environ.get(TOKEN_VARIABLE)
    checked = None if token is None else token_of(token)
    return Service(address_of(url), checked, timeout, max_retries, max_wait)


def token_of(token: str) -> str:
    """The token; raises `ValueError`, which does not repeat it, if it cannot be sent."""
    if token.isascii() and token.isprintable():
        return token
    raise ValueError("the token has a character that no header can have, such as a line end")


def address_of(url: str | None) -> str:
    """The address of the service: `url`, else SMART_EMBEDDER_URL, else port 8000 of this machine.

    Raises `ValueError` if it is none.
    """
    given = url if url is not None else os.environ.get(URL_VARIABLE) or DEFAULT_URL
    try:
        parsed = httpx.URL(given)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"{given!r} is no address such as {DEFAULT_URL}: {error}") from error
    if parsed.port is not None and parsed.port not in _PORTS:
        raise ValueError(f"the address {given} has a port above {_PORTS[-1]}")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"the address {given} does not begin with http://, as {DEFAULT_URL} does")
    if "v1" in parsed.path.split("/"):
        raise ValueError(
            f"the address {given} has /v1, which OpenAI's clients need and this one does not: "
            "leave it out"
        )
    if parsed.query or parsed.fragment:
        raise ValueError(f"the address {given} has more than a path: leave out what follows it")
    return given.rstrip("/")


def _texts(texts: Sequence[str]) -> list[str]:
    """The texts as they are sent; raises `SmartEmbedderError` for what is none."""
    if isinstance(texts, str):
        raise TypeError("one string is no list of texts: put it into a list")
    sent = list(texts)
    for place, text in enumerate(sent):
        if not isinstance(text, str):
            detail = f"the text in place {place} is {type(text).__name__} and no string"
            raise SmartEmbedderError(detail, INVALID_INPUT)
    return sent


def _as_json(body: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[max(error.start - 40, 0) : error.start]
        detail = f"a text has half of a surrogate pair, which cannot be sent, after {half!r}"
        raise SmartEmbedderError(detail, INVALID_INPUT) from error
    except (RecursionError, TypeError, ValueError) as error:
        raise SmartEmbedderError(f"the request is no JSON: {error}", INVALID_INPUT) from error


def _priority(priority: int | None) -> dict[str, str]:
    return {} if priority is None else {"Priority": f"u={priority}"}
