"""Text for a terminal, which a document or a server must not be able to command."""

import json
from typing import Any

# C0, DEL and C1, which move the cursor or more, and what changes the direction of writing.
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
# Halves of surrogate pairs, which no terminal can be sent.
_HALVES = range(0xD800, 0xE000)
_PLAIN = dict.fromkeys(_CONTROLS, " ") | dict.fromkeys(_HALVES, "\N{REPLACEMENT CHARACTER}")
_ESCAPED = {code: f"\\u{code:04x}" for code in (*_CONTROLS, *_HALVES)}


def plain(text: str) -> str:
    """The text in one line, without its control characters."""
    return text.translate(_PLAIN)


def plain_json(value: Any) -> str:
    """The value as JSON in one line, with its control characters escaped."""
    return json.dumps(value, ensure_ascii=False).translate(_ESCAPED)
