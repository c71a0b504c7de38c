"""Reads headers that state preferences: Accept, Accept-Encoding and Priority."""

import re
from functools import lru_cache

import http_sf
from fastapi import Request
from starlette.datastructures import Headers

_DEFAULT_URGENCY, _LEAST_URGENT = 3, 7

# Limits of such a header; real ones are shorter.
_MAX_CHARACTERS = 1024
_MAX_ITEMS = 64
_QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")


def read_preference(headers: Headers, name: str) -> str:
    """Join the values of a header; empty if it is missing or longer than any real one.

    The length is limited because the header is parsed on the event loop, before any limit of the
    client is checked.
    """
    joined = ", ".join(headers.getlist(name))
    return joined if len(joined) <= _MAX_CHARACTERS else ""


def parse_preferences(header: str) -> dict[str, float]:
    """The quality, 0 to 1, of each item of an Accept or Accept-Encoding header, by RFC 9110.

    Malformed items are ignored, and so are those beyond the first 64.
    """
    found: dict[str, float] = {}
    for item in header.lower().split(",", _MAX_ITEMS)[:_MAX_ITEMS]:
        name, *parameters = (part.strip() for part in item.split(";"))
        quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        if name and _QUALITY.fullmatch(quality):
            found[name] = float(quality)
    return found


@lru_cache(maxsize=256)  # Clients send the same header with every request.
def choose_preferred(header: str, offered: tuple[str, ...]) -> str | None:
    """Choose from `offered` by such a header, the first among equals; None if it accepts none."""
    qualities = parse_preferences(header)
    accepted = [name for name in offered if qualities.get(name)]
    return max(accepted, key=lambda name: qualities[name], default=None)


def is_bulk(request: Request) -> bool:
    """Whether the Priority header asks for less than the default urgency, u=3.

    Malformed values are ignored, as RFC 9218 demands.
    """
    priority = read_preference(request.headers, "priority")
    if not priority:
        return False
    try:
        fields = http_sf.parse(priority.encode("latin-1"), tltype="dictionary")
    except http_sf.StructuredFieldError:
        return False
    entry = fields.get("u") if isinstance(fields, dict) else None
    value = entry[0] if isinstance(entry, tuple) else None
    # In Python a boolean is an int; in the RFC it is another type.
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return _DEFAULT_URGENCY < value <= _LEAST_URGENT
