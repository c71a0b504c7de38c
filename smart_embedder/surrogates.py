"""Replace lone surrogates, which are no characters, by U+FFFD.

Text splitters in JavaScript leave them in JSON as escapes, and Python's `surrogateescape` in
strings. A high and a low surrogate in a row are read as the character that they encode.
"""

import json
import re
from typing import Any

import numpy as np

_ESCAPE = b"\\ud"
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def without_surrogates(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate; the same object if it has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _replace_surrogates(_PAIR.sub(_decode_pair, text))
    return text


def _decode_pair(pair: "re.Match[str]") -> str:
    return pair[0].encode("utf-16", "surrogatepass").decode("utf-16")


def _replace_surrogates(text: str) -> str:
    """Replace every surrogate; takes a few milliseconds for each megabyte."""
    content = np.frombuffer(bytearray(text, "utf-8", "surrogatepass"), np.uint8)
    # In UTF-8, surrogates and U+FFFD have three bytes, and no other character starts like these.
    (positions,) = np.nonzero((content[:-2] == 0xED) & (content[1:-1] >= 0xA0))  # noqa: PLR2004
    for offset, byte in enumerate("\ufffd".encode()):
        content[positions + offset] = byte
    return content.tobytes().decode()


def parse_with_surrogates(content: bytes, replaced: list[str]) -> Any:
    """Parse JSON with escapes of lone surrogates, and replace the surrogates.

    Appends the JSON pointers of changed strings to `replaced`. Raises `ValueError` for JSON without
    such escapes and for invalid JSON.
    """
    if _ESCAPE not in content and _ESCAPE.replace(b"d", b"D") not in content:
        raise ValueError("it has no surrogates")
    try:
        return _replace_in(json.loads(content.decode()), "", replaced)
    except RecursionError:
        raise ValueError("it has too many levels") from None


def _replace_in(value: Any, pointer: str, replaced: list[str]) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            replaced.append(pointer)
            return _replace_surrogates(value)  # The parser has decoded pairs.
        return value
    if isinstance(value, list):
        return [_replace_in(item, f"{pointer}/{i}", replaced) for i, item in enumerate(value)]
    if isinstance(value, dict):
        renamed = {without_surrogates(name): item for name, item in value.items()}
        return {
            name: _replace_in(item, f"{pointer}/{_escape(name)}", replaced)
            for name, item in renamed.items()
        }
    return value


def _escape(name: str) -> str:
    """Escape a name for a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
