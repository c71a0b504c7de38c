"""Cutting an enormous text where no tokenizer looks across."""

import re
from collections.abc import Iterator

# One space between two letters or digits. Every tokenizer here ends a word before it: those that
# split at white space drop it, the others make it the beginning of the next word.
_BORDER = re.compile(r"(?<=[^\W_]) (?=[^\W_])")


def pieces_of(text: str, characters: int) -> Iterator[str]:
    """`text` in pieces of about `characters`, each but the first beginning with a space.

    The tokens of the pieces, one after the other, are the tokens of the text. Where a text has no
    border a piece is as long as it must be.
    """
    start = 0
    while start < len(text):
        border = _BORDER.search(text, start + characters)
        stop = border.start() if border else len(text)
        yield text[start:stop]
        start = stop
