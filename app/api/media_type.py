"""What a body may be declared as: JSON in UTF-8, as it is.

A page of another origin may send a browser's POST of any kind but one: JSON needs the browser to
ask first. So the type is looked at, and a body without one is no JSON.
"""

from email.message import Message

from starlette.datastructures import Headers

from app.errors import UnsupportedMediaError
from app.observability.logs import escape_text

_LONGEST = 60
_HOW = "send JSON, with Content-Type: application/json"
# Every text in ASCII is the same in UTF-8.
_CHARSETS = {"utf-8", "utf8", "us-ascii", "ascii"}


def require_json(headers: Headers) -> None:
    """Raise `UnsupportedMediaError` unless the headers declare JSON in UTF-8, not compressed."""
    _require_type(headers.getlist("content-type"))
    for encoding in ",".join(headers.getlist("content-encoding")).split(","):
        if encoding.strip().lower() not in {"", "identity"}:
            raise UnsupportedMediaError(
                f"the body's Content-Encoding is {_quoted(encoding)}: send it as it is, without one"
            )


def _require_type(values: list[str]) -> None:
    if not values:
        raise UnsupportedMediaError(f"the request has no Content-Type: {_HOW}")
    message = Message()
    message["Content-Type"] = values[0]
    if len(values) > 1 or not _is_json(values[0]):
        raise UnsupportedMediaError(f"the Content-Type is {_quoted(', '.join(values))}: {_HOW}")
    charset = str(message.get_param("charset", "utf-8"))
    if charset.strip().lower() not in _CHARSETS:
        raise UnsupportedMediaError(
            f"the body's charset is {_quoted(charset)}: send JSON in UTF-8, as it always is"
        )


def _is_json(value: str) -> bool:
    kind, _, subtype = value.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _quoted(text: str) -> str:
    return escape_text(text.strip(), _LONGEST)
