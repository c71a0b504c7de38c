"""Replace lone surrogates, which are no characters, by U+FFFD.

JavaScript's splitters leave them in JSON as escapes, Python's `surrogateescape` in strings. A high
and a low surrogate side by side are read as the character that they encode.
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
        return _without_halves(_PAIR.sub(_joined, text))
    return text


def _joined(pair: "re.Match[str]") -> str:
    return pair[0].encode("utf-16", "surrogatepass").decode("utf-16")


def _without_halves(text: str) -> str:
    """Replace every surrogate in a few milliseconds for each megabyte."""
    content = np.frombuffer(bytearray(text, "utf-8", "surrogatepass"), np.uint8)
    # Surrogates have three bytes in UTF-8, as U+FFFD has, and no other character begins so.
    (places,) = np.nonzero((content[:-2] == 0xED) & (content[1:-1] >= 0xA0))  # noqa: PLR2004
    for offset, byte in enumerate("\ufffd".encode()):
        content[places + offset] = byte
    return content.tobytes().decode()


def parse_with_surrogates(content: bytes, replaced: list[str]) -> Any:
    """Parse JSON that has escapes of lone surrogates, and replace them.

    Appends to `replaced` a JSON pointer for each string that had some. Raises `ValueError` for
    other invalid JSON.
    """
    if _ESCAPE not in content and _ESCAPE.replace(b"d", b"D") not in content:
        raise ValueError("it has no surrogates")
    try:
        return _replaced(json.loads(content.decode()), "", replaced)
    except RecursionError:
        raise ValueError("it has too many levels") from None


def _replaced(value: Any, pointer: str, replaced: list[str]) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            replaced.append(pointer)
            return _without_halves(value)  # The parser has joined pairs.
        return value
    if isinstance(value, list):
        return [_replaced(item, f"{pointer}/{i}", replaced) for i, item in enumerate(value)]
    if isinstance(value, dict):
        named = {without_surrogates(name): item for name, item in value.items()}
        return {
            name: _replaced(item, f"{pointer}/{_escaped(name)}", replaced)
            for name, item in named.items()
        }
    return value


def _escaped(name: str) -> str:
    """A name as it stands in a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
