"""Tokenisation with exact counts: a text is tokenised whole, then cut, never cut and re-tokenised.

The model's own `tokenizer.json` is read with the tokenizers library, whose encoding releases the
GIL and may run in several threads at once.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from app.errors import StartupError
from app.jobs import TokenIds, TokenizedText


@dataclass(frozen=True, slots=True)
class Template:
    """The special tokens that a model wants before and after a text."""

    prefix: TokenIds
    suffix: TokenIds

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)


class TextTokenizer:
    """Turns texts into the token ids of one model, cut from the end to `max_length`."""

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = _template_of(tokenizer)
        self.max_length = max_length
        if max_length <= len(self._template):
            raise StartupError(
                f"a length limit of {max_length} tokens leaves no room for text beside the "
                f"{len(self._template)} special tokens of this model"
            )

    @classmethod
    def from_folder(cls, folder: Path, max_length: int) -> "TextTokenizer":
        """Read `tokenizer.json`; raise `StartupError` where it is missing or damaged."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise StartupError(f"{folder} holds no tokenizer.json")
        try:
            return cls(Tokenizer.from_file(str(path)), max_length)
        except StartupError:
            raise
        except Exception as error:  # The tokenizers library raises bare Exception.
            raise StartupError(f"{path} cannot be read: {error}") from error

    def encode(self, texts: list[str]) -> list[TokenizedText]:
        """Token ids of each text with special tokens, and how many there were before the cut."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._finish(np.array(encoding.ids, dtype=np.int64)) for encoding in encodings]

    def token_id(self, token: str) -> int | None:
        """The id of a token, or None where the vocabulary has none."""
        return self._tokenizer.token_to_id(token)

    def _finish(self, ids: TokenIds) -> TokenizedText:
        kept = ids[: self.max_length - len(self._template)]
        whole = np.concatenate((self._template.prefix, kept, self._template.suffix))
        return TokenizedText(whole, original_tokens=len(ids) + len(self._template))


def _template_of(tokenizer: Tokenizer) -> Template:
    """Find the special tokens by looking where a plain text lands between them."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            prefix, suffix = framed[:start], framed[start + len(plain) :]
            return Template(np.array(prefix, dtype=np.int64), np.array(suffix, dtype=np.int64))
    raise StartupError("tokenizer.json changes the text itself where it adds special tokens")
