"""Slices of a text that are small enough to be tokenised, also after normalisation.

A slice ends at a border if it holds one: a place where the pre-tokenizer ends a word whatever
stands on either side, so that the tokens of the slices are those of the whole text. A slice without
a border is cut hard, and the tokens beside that cut may differ from those of the whole text.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from app.engine.tokenizer_threads import NORMALIZATION_GROWTHS, normalization_growth

SLICE_CHARACTERS = 65_536

# One pattern for each kind of pre-tokenizer, searched from the end. A slice ends before a character
# that no normalisation joins to what stands before it.

# White space ends a word and is dropped. Not after a carriage return, nor after the characters that
# make one grapheme with what follows, which SentencePiece's character maps read as one.
_WHITE_SPACE_DROPPED = (
    "[^\r\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\u0d4e"
    "\U000110bd\U000110cd\U000111c2-\U00012000](?=[ \t\n\u3000])"
)
# GPT-2's words and Qwen's: white space never stands inside a word or at its end, and letters end
# where none follows. Not after ">" or "]", the end of a special token that may swallow a space, nor
# after letters that NFC takes apart into a letter and a mark.
_BYTE_LEVEL = (
    r"(?:[^\s>\]](?=[ \t\u3000])|"
    r"(?![\u0958-\u0fff\ufb1d-\ufb4e])[^\W_](?=[\n\r,.;:!?()\u2026\u3001\u3002\u300c-\u300f"
    r"\uff01\uff0c\uff0e\uff1a\uff1b\uff1f]))"
)
# Every tokenizer known ends a word before a space between letters or digits.
_ANY = "[^\\W_](?= [^\\W_])"

# Qwen's own pre-tokenizer, from Qwen2 on.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Slicer:
    """Cuts texts for one tokenizer, into slices of at most `characters`.

    Those are ASCII characters: a slice of others is as many times smaller as they may grow.
    """

    def __init__(self, tokenizer: Tokenizer, characters: int = SLICE_CHARACTERS) -> None:
        self.characters = characters
        self._last_border = re.compile(f"(?s:.*){_borders_of(tokenizer)}")

    def slices(self, text: str) -> Iterator[str]:
        """The text in slices; joined they are the text, and an empty text has none."""
        start = 0
        while start < len(text):
            stop = self._stop(text, start)
            yield text[start:stop]
            start = stop

    def _stop(self, text: str, start: int) -> int:
        stop = min(len(text), start + self._max_length(text, start))
        if stop == len(text):
            return stop
        border = self._last_border.match(text, start, stop + 1)
        return border.end() if border else stop

    def _max_length(self, text: str, start: int) -> int:
        """The most characters from `start` on that make one slice."""
        for growth in NORMALIZATION_GROWTHS:
            length = max(1, self.characters // growth)
            if normalization_growth(text[start : start + length]) <= growth:
                break
        return length


def _borders_of(tokenizer: Tokenizer) -> str:
    steps = _pre_tokenizers_of(tokenizer)
    kind = steps[0].get("type") if steps else None
    if kind in {"WhitespaceSplit", "BertPreTokenizer"}:
        return _WHITE_SPACE_DROPPED
    words = kind == "ByteLevel" and steps[0].get("use_regex")
    if words or (kind == "Split" and steps[0].get("pattern") == {"Regex": QWEN_WORDS}):
        return _ANY if any(step.get("add_prefix_space") for step in steps) else _BYTE_LEVEL
    return _ANY


def _pre_tokenizers_of(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Its pre-tokenizers one by one, as `tokenizer.json` describes them."""
    if tokenizer.pre_tokenizer is None:
        return []
    described = json.loads(tokenizer.pre_tokenizer.__getstate__())
    steps: list[dict[str, Any]] = described.get("pretokenizers", [described])
    return steps
