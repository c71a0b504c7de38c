"""Reads headers of preferences, such as Accept, by RFC 9110, and compresses as they ask.

They are read on the event loop, before any limit counts the request, so that values are ignored
that are longer than any real one, and so are items beyond those that a real one has.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from backports import zstd
from isal import isal_zlib
from starlette.datastructures import Headers
from starlette.requests import Request

_MAX_CHARACTERS = 1024
_MAX_ITEMS = 64
_QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")

_GZIP_LEVEL = _ZSTD_LEVEL = 1
_GZIP_WINDOW = 31

# Of each encoding: a new compressor, and how it is flushed after a piece and at the end.
_COMPRESSORS: Mapping[str, tuple[Callable[[], Any], int, int]] = {
    "zstd": (
        lambda: zstd.ZstdCompressor(_ZSTD_LEVEL),
        zstd.ZstdCompressor.FLUSH_BLOCK,
        zstd.ZstdCompressor.FLUSH_FRAME,
    ),
    "gzip": (
        lambda: isal_zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP_WINDOW),
        isal_zlib.Z_SYNC_FLUSH,
        isal_zlib.Z_FINISH,
    ),
}


def preference(headers: Headers, name: str) -> str:
    """The values of a header, joined; empty where there is none, or too much of it."""
    joined = ", ".join(headers.getlist(name))
    return joined if len(joined) <= _MAX_CHARACTERS else ""


def preferences(header: str) -> dict[str, float]:
    """The quality, 0 to 1, of each item of an Accept or Accept-Encoding header.

    A malformed item is ignored, which is no reason to refuse a request.
    """
    found: dict[str, float] = {}
    for item in header.lower().split(",", _MAX_ITEMS)[:_MAX_ITEMS]:
        name, *parameters = (part.strip() for part in item.split(";"))
        quality = next((each[2:] for each in parameters if each.startswith("q=")), "1")
        if name and _QUALITY.fullmatch(quality):
            found[name] = float(quality)
    return found


def encoding_of(request: Request) -> str | None:
    """The encoding that the request prefers, if it accepts one of `_COMPRESSORS`."""
    wanted = preferences(preference(request.headers, "accept-encoding"))
    named = {name: wanted[name] for name in _COMPRESSORS if wanted.get(name)}
    best = max(named, key=lambda name: named[name], default=None)
    identity = wanted.get("identity", 0.0)
    return None if best is None or identity > named[best] else best


class FlushedCompressor:
    """Compresses an answer piece by piece; each piece can be decompressed when it arrives."""

    def __init__(self, encoding: str) -> None:
        create, self._flush, self._finish = _COMPRESSORS[encoding]
        self._compressor = create()

    def compress(
        self, chunks: Iterable[bytes | memoryview], *, last: bool = False
    ) -> Iterator[bytes]:
        """Compress the chunks of one piece one by one; other threads run meanwhile."""
        for chunk in chunks:
            yield self._compressor.compress(chunk)
        yield self._compressor.flush(self._finish if last else self._flush)


def compress(chunks: Iterable[bytes | memoryview], encoding: str) -> Iterator[bytes]:
    """Compress a whole answer."""
    return FlushedCompressor(encoding).compress(chunks, last=True)
