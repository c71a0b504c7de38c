"""How large a text may be once a tokenizer has normalised it."""

import re

# U+FDFA becomes 18 characters under NFKC, U+3316 18 bytes, U+1D160 12 under NFC.
_LIGATURES = re.compile(
    "[\u2474-\u24b5\u3200-\u33ff\ufd00-\ufdff\U0001d100-\U0001d1ff\U0001f100-\U0001f2ff]"
)
GROWTHS = (1, 4, 18)


def growth_of(text: str) -> int:
    """The most characters that normalisation makes of one of `text`: one of `GROWTHS`.

    Under NFC, NFD, NFKC and NFKD alike; those characters have at most four bytes for each of this
    number, in UTF-8.
    """
    if text.isascii():
        return 1
    return 18 if _LIGATURES.search(text) else 4
