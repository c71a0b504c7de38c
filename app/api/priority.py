"""The Priority header of RFC 9218: how urgent a request is beside others that wait."""

from typing import Any, Final

import http_sf
from fastapi import Request

from app.engine import DEFAULT_URGENCY

_LEAST_URGENT = 7

PRIORITY_PARAMETER: Final[dict[str, Any]] = {
    "name": "Priority",
    "in": "header",
    "required": False,
    "description": (
        "RFC 9218 urgency, u=0 (first) to u=7 (background). Each step doubles the request's share "
        "of the device while others wait; nobody is starved."
    ),
    "schema": {"type": "string", "default": f"u={DEFAULT_URGENCY}"},
}


def urgency_of(request: Request) -> int:
    """The request's urgency; as the RFC asks, what is malformed or unknown counts as not sent."""
    lines = request.headers.getlist("priority")
    if not lines:
        return DEFAULT_URGENCY
    try:
        fields = http_sf.parse(", ".join(lines).encode("latin-1"), tltype="dictionary")
    except http_sf.StructuredFieldError:
        return DEFAULT_URGENCY
    entry = fields.get("u") if isinstance(fields, dict) else None
    value = entry[0] if isinstance(entry, tuple) else None
    # A boolean is an int in Python, and a value of another type here.
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LEAST_URGENT:
        return value
    return DEFAULT_URGENCY
