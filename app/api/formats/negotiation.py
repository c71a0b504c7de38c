"""Chooses the format of an answer by the Accept header of RFC 9110."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

from starlette.requests import Request

from app.api.formats import arrow, msgpack, safetensors
from app.api.formats.answer import EmbeddingAnswer
from app.api.preferences import preference, preferences
from app.api.rendering import JSON, Chunk

SAFETENSORS = "application/vnd.safetensors"
# Renderers by media type; JSON, the default, has its own.
BINARY: Mapping[str, Callable[[EmbeddingAnswer], Iterator[Chunk]]] = {
    "application/vnd.apache.arrow.stream": arrow.render,
    "application/msgpack": msgpack.render,
    SAFETENSORS: safetensors.render,
}


def media_type_of(request: Request, answered: tuple[str, ...] = (JSON, *BINARY)) -> str:
    """The media type among `answered` that the request prefers; by default the first one."""
    return _preferred(preference(request.headers, "accept"), answered)


@lru_cache(maxsize=64)  # Clients send the same header with every request.
def _preferred(accept: str, answered: tuple[str, ...]) -> str:
    wanted = preferences(accept)
    named = {name: wanted[name] for name in answered if wanted.get(name)}
    return max(named, key=lambda name: named[name], default=answered[0])
