"""Lone surrogates, halves of pairs that are no characters: they are read as U+FFFD.

JavaScript's splitters leave them in JSON as escapes, and Python's `surrogateescape` in strings. Two
halves that stand together are the character that they are of.
"""

import json
import re
from typing import Any

import numpy as np

_ESCAPE = b"\\ud"
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def without_surrogates(text: str) -> str:
    """The text, of which U+FFFD stands for each lone surrogate; the same object without any."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _without_halves(_PAIR.sub(_joined, text))
    return text


def _joined(pair: "re.Match[str]") -> str:
    return pair[0].encode("utf-16", "surrogatepass").decode("utf-16")


def _without_halves(text: str) -> str:
    """The text with U+FFFD for every surrogate, some milliseconds for each megabyte."""
    content = np.frombuffer(bytearray(text, "utf-8", "surrogatepass"), np.uint8)
    # Surrogates have three bytes in UTF-8, as U+FFFD has, and no other character begins so.
    (places,) = np.nonzero((content[:-2] == 0xED) & (content[1:-1] >= 0xA0))  # noqa: PLR2004
    for offset, byte in enumerate("\ufffd".encode()):
        content[places + offset] = byte
    return content.tobytes().decode()


def parse_with_surrogates(content: bytes, replaced: list[str]) -> Any:
    """The value in some JSON that may have escapes of lone surrogates, without them.

    Appends JSON pointers to the strings that had some. Raises `ValueError` for other invalid JSON.
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
            name: _replaced(
                item, f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}", replaced
            )
            for name, item in named.items()
        }
    return value


def _escaped(name: str) -> str:
    """A name as it stands in a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
