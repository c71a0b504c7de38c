"""Upper bounds for the size of a response, so that no server fills the client's memory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Vector widths, far above those of any model.
_MAX_WIDTH, _MAX_COLBERT_WIDTH, _MAX_MUVERA_WIDTH = 16_384, 4_096, 65_536
_BYTES_PER_NUMBER = 4
# A token has at least one byte of the normalized text. Unicode normalization makes up to twelve
# bytes of one, but leaves ASCII as it is; there, a word may get another token for its space.
_TOKENS_PER_BYTE, _TOKENS_PER_ASCII_BYTE = 12, 2
# Special tokens, and those that pad a ColBERT query.
_EXTRA_TOKENS = 1024
# Metadata of the response, of each text and of each token.
_METADATA_BYTES, _TEXT_BYTES, _TOKEN_BYTES = 65_536, 4_096, 128
_METADATA_CONTAINERS, _TEXT_CONTAINERS = 256, 32
# A character of a passage in JSON may be escaped, such as \u0000.
_ESCAPED_BYTES = 6


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one response.

    Attributes:
        bytes: The size of its body.
        containers: The number of objects and lists in its JSON. Each may have only two bytes there,
            but takes about sixty in memory.
    """

    bytes: int
    containers: int


# For errors and /health.
SMALL = Limits(2**20, 10_000)


def load_json(content: bytes | str, limits: Limits) -> Any:
    """Parse JSON; raise `ValueError` if it has more objects and lists than allowed."""
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass")
    containers = content.count(b"[") + content.count(b"{")
    if containers > limits.containers:
        raise ValueError(f"it has {containers} objects and lists, which are too many")
    return json.loads(content)


def of_vectors(texts: Sequence[str], options: Mapping[str, Any]) -> Limits:
    """Return the limits of a response with the vectors of `texts`, for these options of `embed`."""
    tokens = sum(map(_max_tokens, texts))
    if options.get("prompt"):
        tokens += len(texts) * _max_tokens(options["prompt"])
    size = _METADATA_BYTES + _TEXT_BYTES * len(texts)
    containers = _METADATA_CONTAINERS + _TEXT_CONTAINERS * len(texts)
    if options.get("return_tokens"):
        # Tokens may be brackets, which `load_json` counts, too.
        size, containers = size + _TOKEN_BYTES * tokens, containers + 2 * tokens
    numbers = _MAX_WIDTH * len(texts) + 2 * tokens
    if options.get("muvera"):
        numbers += _MAX_MUVERA_WIDTH * len(texts)
    if options.get("return_colbert"):
        numbers += (_MAX_COLBERT_WIDTH + 1) * tokens
    return Limits(size + _BYTES_PER_NUMBER * numbers, containers)


def of_ranking(query: str, passages: Sequence[str]) -> Limits:
    """Return the limits of a response with ranked `passages`."""
    characters = sum(map(len, passages))
    brackets = sum(text.count("[") + text.count("{") for text in (query, *passages))
    return Limits(
        _METADATA_BYTES + _TEXT_BYTES * len(passages) + _ESCAPED_BYTES * characters,
        _METADATA_CONTAINERS + _TEXT_CONTAINERS * len(passages) + brackets,
    )


def of_tokens(texts: Sequence[str]) -> Limits:
    """Return the limits of a response with the tokens of `texts`."""
    tokens = sum(map(_max_tokens, texts))
    return Limits(_METADATA_BYTES + _TOKEN_BYTES * tokens, _METADATA_CONTAINERS + 2 * tokens)


def _max_tokens(text: str) -> int:
    """Return an upper bound of the tokens that any model makes of a text."""
    per_byte = _TOKENS_PER_ASCII_BYTE if text.isascii() else _TOKENS_PER_BYTE
    return per_byte * len(text.encode("utf-8", "surrogatepass")) + _EXTRA_TOKENS
