"""Parses headers of preferences, such as Accept, by RFC 9110."""

from decimal import Decimal
from typing import Any

import http_sf


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
