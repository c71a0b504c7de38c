"""Slices of a text that are small enough to be tokenised, also after normalisation.

A slice ends at a border, if it has one: a place where the pre-tokenizer ends a word whatever is on
either side, so that the tokens of the slices are those of the whole text. A slice without a border
is cut anywhere, and tokens next to that cut may differ from those of the whole text.

Texts are read up to a number of tokens. White space and control characters, which make no tokens,
would be read without limit, so long runs of them are shortened.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from smart_embedder.engine.scheduling.admission import NORMALIZATION_GROWTHS, normalization_growth

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


# White space and control characters. Beside them a normalisation changes nothing else, but for a
# carriage return before a line feed, and a mark behind the last of them.
_MAYBE_DROPPED = "".join(
    chr(code)
    for first, last in (
        *((0x00, 0x20), (0x7F, 0xA0), (0xAD, 0xAD), (0x1680, 0x1680), (0x2000, 0x200B)),
        *((0x200E, 0x200F), (0x2028, 0x202F), (0x205F, 0x2064), (0x3000, 0x3000)),
        (0xFEFF, 0xFEFF),
    )
    for code in range(first, last + 1)
)
_KEPT_AT_ENDS = 8


class RunShortener:
    """Shortens long runs of characters that a tokenizer drops, which leaves the tokens as they are.

    It tries which characters those are: some end a word, as a space does, and others do not.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        def is_read_as(other: str, character: str) -> bool:
            return not ids(character * 3) and ids(f"a{character * 3}b") == ids(f"a{other}b")

        spaces = [each for each in _MAYBE_DROPPED if is_read_as(" ", each)]
        ignored = [each for each in _MAYBE_DROPPED if is_read_as("", each)]
        # Where a space counts, others may stand for one.
        dropped = re.escape("".join(spaces + ignored)) if " " in spaces else ""
        least = 2 * _KEPT_AT_ENDS + 2
        self._run = re.compile(f"[{dropped}]{{{least},}}") if dropped else None
        self._ignored = "".join(ignored)

    def shorten(self, text: str) -> str:
        """The text with no more than the ends of each run, and a space if one stood between."""
        return text if self._run is None else self._run.sub(self._ends, text)

    def _ends(self, run: "re.Match[str]") -> str:
        text, kept = run[0], _KEPT_AT_ENDS
        ends_word = text[kept:-kept].strip(self._ignored)
        return text[:kept] + (" " if ends_word else "") + text[-kept:]


class Slicer:
    """Cuts texts for one tokenizer, into slices of at most `characters`.

    Those are ASCII characters: a slice of others is as many times smaller as they may grow.
    """

    def __init__(self, tokenizer: Tokenizer, characters: int = SLICE_CHARACTERS) -> None:
        self.characters = characters
        border = _borders_of(tokenizer)
        self._last_border = re.compile(f"(?s:.*){border}")
        self._border = re.compile(border)

    def slices(self, text: str, *, from_end: bool = False) -> Iterator[str]:
        """The text in slices, the last one first if `from_end`; an empty text has none."""
        begin, end = 0, len(text)
        while begin < end:
            for growth in NORMALIZATION_GROWTHS:
                length = max(1, self.characters // growth)
                start = max(0, end - length) if from_end else begin
                stop = end if from_end else min(begin + length, end)
                if normalization_growth(text[start:stop]) <= growth:
                    break
            if from_end:
                border = self._border.search(text, start - 1, stop) if start else None
                end = start = border.end() if border else start
            else:
                border = self._last_border.match(text, start, stop + 1) if stop < end else None
                begin = stop = border.end() if border else stop
            yield text[start:stop]


def _borders_of(tokenizer: Tokenizer) -> str:
    steps = steps_of(tokenizer.pre_tokenizer, "pretokenizers")
    kind = steps[0].get("type") if steps else None
    if kind in {"WhitespaceSplit", "BertPreTokenizer"}:
        return _WHITE_SPACE_DROPPED
    words = kind == "ByteLevel" and steps[0].get("use_regex")
    if words or (kind == "Split" and steps[0].get("pattern") == {"Regex": QWEN_WORDS}):
        return _ANY if any(step.get("add_prefix_space") for step in steps) else _BYTE_LEVEL
    return _ANY


def steps_of(component: Any, parts: str) -> list[dict[str, Any]]:
    """A normalizer's or pre-tokenizer's steps, whose sequences are called `parts` in the file."""
    if component is None:
        return []
    described = json.loads(component.__getstate__())
    steps: list[dict[str, Any]] = described.get(parts, [described])
    return steps
