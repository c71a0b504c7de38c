"""Header fields that state preferences: Accept, Priority."""

import re
from functools import lru_cache

import http_sf
from fastapi import Request
from starlette.datastructures import Headers

_DEFAULT_URGENCY, _LEAST_URGENT = 3, 7

# Of a header with preferences, and of its items.
_MAX_CHARACTERS = 1024
_MAX_ITEMS = 64
_QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")


def read_preference(headers: Headers, name: str) -> str:
    """The values of a header, joined; empty where there is none, or too much of it.

    It is read on the event loop, before any limit counts the request: a value that is longer than
    any real one is ignored.
    """
    joined = ", ".join(headers.getlist(name))
    return joined if len(joined) <= _MAX_CHARACTERS else ""


def parse_preferences(header: str) -> dict[str, float]:
    """The quality, 0 to 1, of each item of an Accept or Accept-Encoding header, by RFC 9110.

    A malformed item is ignored, which is no reason to refuse a request, and so are items beyond
    those that a real header has.
    """
    found: dict[str, float] = {}
    for item in header.lower().split(",", _MAX_ITEMS)[:_MAX_ITEMS]:
        name, *parameters = (part.strip() for part in item.split(";"))
        quality = next((each[2:] for each in parameters if each.startswith("q=")), "1")
        if name and _QUALITY.fullmatch(quality):
            found[name] = float(quality)
    return found


@lru_cache(maxsize=256)  # Clients send the same header with every request.
def choose_preferred(header: str, offered: tuple[str, ...]) -> str | None:
    """The one of `offered` that such a header likes best, the first of equals; None for none."""
    wanted = parse_preferences(header)
    liked = [name for name in offered if wanted.get(name)]
    return max(liked, key=lambda name: wanted[name], default=None)


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
    # A boolean is an int in Python, and another type in the RFC.
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return _DEFAULT_URGENCY < value <= _LEAST_URGENT
