"""Reads headers of preferences, such as Accept, by RFC 9110.

They are read on the event loop, before any limit counts the request, so that values are ignored
that are longer than any real one, and so are items beyond those that a real one has.
"""

import re

from starlette.datastructures import Headers

_MAX_CHARACTERS = 1024
_MAX_ITEMS = 64
_QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")


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
