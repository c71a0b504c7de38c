"""How large an honest answer can be, so that no server makes a client read or hold more."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Numbers of a vector, far above those of any model.
_WIDEST, _WIDEST_COLBERT, _WIDEST_MUVERA = 16_384, 4_096, 65_536
_BYTES_PER_NUMBER = 4
# A token is at least a byte of the text after Unicode's normalization, which makes up to twelve
# bytes of one; of ASCII it makes none, and a word may get a token for the space before it.
_TOKENS_PER_BYTE, _TOKENS_PER_ASCII_BYTE = 12, 2
# Of the model's own, and of those that fill up a query for ColBERT.
_TOKENS_BESIDES = 1024
# What an answer says beside vectors: once, about each text, and about each token.
_FACTS_BYTES, _TEXT_BYTES, _TOKEN_BYTES = 65_536, 4_096, 128
_FACTS_CONTAINERS, _TEXT_CONTAINERS = 256, 32
# A character of a passage in JSON, such as \u0000.
_ESCAPED_BYTES = 6


@dataclass(frozen=True, slots=True)
class Limits:
    """The most of one answer.

    Attributes:
        bytes: Of its body.
        containers: Objects and lists in its JSON, each of which takes two bytes there and some
            sixty in memory.
    """

    bytes: int
    containers: int


# Of refusals, and of /health.
SMALL = Limits(2**20, 10_000)


def load_json(content: bytes | str, limits: Limits) -> Any:
    """What the JSON says; raises `ValueError` if it has more objects and lists than it may."""
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass")
    found = content.count(b"[") + content.count(b"{")
    if found > limits.containers:
        raise ValueError(f"it has {found} objects and lists, which are too many")
    return json.loads(content)


def of_vectors(texts: Sequence[str], options: Mapping[str, Any]) -> Limits:
    """Of the vectors of `texts` with these options of `embed`."""
    tokens = sum(map(_most_tokens, texts))
    if options.get("prompt"):
        tokens += len(texts) * _most_tokens(options["prompt"])
    size = _FACTS_BYTES + _TEXT_BYTES * len(texts)
    containers = _FACTS_CONTAINERS + _TEXT_CONTAINERS * len(texts)
    if options.get("return_tokens"):
        # The brackets among the tokens' strings, too.
        size, containers = size + _TOKEN_BYTES * tokens, containers + 2 * tokens
    numbers = _WIDEST * len(texts) + 2 * tokens
    if options.get("muvera"):
        numbers += _WIDEST_MUVERA * len(texts)
    if options.get("return_colbert"):
        numbers += (_WIDEST_COLBERT + 1) * tokens
    return Limits(size + _BYTES_PER_NUMBER * numbers, containers)


def of_ranking(query: str, passages: Sequence[str]) -> Limits:
    """Of the order of `passages`."""
    characters = sum(map(len, passages))
    brackets = sum(each.count("[") + each.count("{") for each in (query, *passages))
    return Limits(
        _FACTS_BYTES + _TEXT_BYTES * len(passages) + _ESCAPED_BYTES * characters,
        _FACTS_CONTAINERS + _TEXT_CONTAINERS * len(passages) + brackets,
    )


def of_tokens(texts: Sequence[str]) -> Limits:
    """Of the tokens of `texts`."""
    tokens = sum(map(_most_tokens, texts))
    return Limits(_FACTS_BYTES + _TOKEN_BYTES * tokens, _FACTS_CONTAINERS + 2 * tokens)


def _most_tokens(text: str) -> int:
    """More tokens than any model makes of a text."""
    per_byte = _TOKENS_PER_ASCII_BYTE if text.isascii() else _TOKENS_PER_BYTE
    return per_byte * len(text.encode("utf-8", "surrogatepass")) + _TOKENS_BESIDES
