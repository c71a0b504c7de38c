"""Which format a client asks for: the Accept header of RFC 9110."""

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import http_sf
from starlette.requests import Request

from app.api.formats import arrow, msgpack, safetensors
from app.api.formats.answer import EmbeddingAnswer
from app.api.rendering import JSON, Chunk

# By media type; JSON, which everybody else gets, has a renderer of its own.
BINARY: Mapping[str, Callable[[EmbeddingAnswer], Iterator[Chunk]]] = {
    "application/vnd.apache.arrow.stream": arrow.render,
    "application/msgpack": msgpack.render,
    "application/vnd.safetensors": safetensors.render,
}


def media_type_of(request: Request) -> str:
    """The media type that the request prefers of those that are answered; JSON in doubt."""
    wanted = preferences(", ".join(request.headers.getlist("accept")))
    named = {name: wanted[name] for name in (JSON, *BINARY) if wanted.get(name)}
    return max(named, key=lambda name: named[name], default=JSON)


def preferences(header: str) -> dict[str, float]:
    """The quality, 0 to 1, of each item of an Accept or Accept-Encoding header.

    Empty where it is malformed, which nobody is refused for.
    """
    if not header:
        return {}
    try:
        items: Any = http_sf.parse(header.lower().encode("latin-1"), tltype="list")
    except (http_sf.StructuredFieldError, UnicodeEncodeError):
        return {}
    return {str(name): _quality(parameters.get("q")) for name, parameters in items}


def _quality(value: object) -> float:
    return float(value) if isinstance(value, (int, Decimal)) else 1.0
