"""Parses headers of preferences, such as Accept, by RFC 9110.

A parser in Python takes a microsecond for a byte, on the event loop and before any limit counts the
request, so that values are ignored that are longer than any real one.
"""

from decimal import Decimal
from typing import Any

import http_sf
from starlette.datastructures import Headers

_MAX_CHARACTERS = 1024


def preference(headers: Headers, name: str) -> str:
    """The values of a header, joined; empty where there is none, or too much of it."""
    joined = ", ".join(headers.getlist(name))
    return joined if len(joined) <= _MAX_CHARACTERS else ""


def preferences(header: str) -> dict[str, float]:
    """The quality, 0 to 1, of each item of an Accept or Accept-Encoding header.

    Empty for a malformed header, which is no reason to refuse a request.
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
