"""Tokenisation with exact counts: a text is tokenised whole, then cut, never cut and re-tokenised.

The model's own `tokenizer.json` is read with the tokenizers library, whose encoding releases the
GIL and may run in several threads at once.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from app.errors import StartupError
from app.jobs import TokenIds, TokenizedText
from app.models.checkpoint import read_config
from app.models.pieces import pieces_of

_PIECE_CHARACTERS = 65_536


@dataclass(frozen=True, slots=True)
class Template:
    """The special tokens that a model wants before and after a text."""

    prefix: TokenIds
    suffix: TokenIds

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The special tokens that a model wants before, between and after two texts."""

    prefix: TokenIds
    middle: TokenIds
    suffix: TokenIds

    def __len__(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)


class TextTokenizer:
    """Turns texts into the token ids of one model, cut from the end to `max_length`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        *,
        closing: str | None = None,
        piece_characters: int = _PIECE_CHARACTERS,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = _closed_with(_template_of(tokenizer), closing, tokenizer)
        self._piece_characters = piece_characters
        self.max_length = max_length
        if max_length <= len(self._template):
            raise StartupError(
                f"a length limit of {max_length} tokens leaves no room for text beside the "
                f"{len(self._template)} special tokens of this model"
            )

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        max_length: int,
        *,
        closing: str | None = None,
        piece_characters: int = _PIECE_CHARACTERS,
    ) -> "TextTokenizer":
        """Read `tokenizer.json`; raise `StartupError` where it is missing, damaged or another's.

        `closing` is a token that must end every text, whether the file's own template adds it or
        not. Texts longer than `piece_characters` are tokenised in pieces of that size.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise StartupError(f"{folder} holds no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
            _require_embeddings(tokenizer, folder)
            return cls(tokenizer, max_length, closing=closing, piece_characters=piece_characters)
        except StartupError:
            raise
        except Exception as error:  # The tokenizers library raises bare Exception.
            raise StartupError(f"{path} cannot be read: {error}") from error

    def encode(self, texts: list[str]) -> list[TokenizedText]:
        """Token ids of each text with special tokens, and how many there were before the cut."""
        return [self._finish(ids) for ids in self.encode_plain(texts)]

    def encode_plain(self, texts: list[str]) -> list[TokenIds]:
        """Token ids of each text, whole and without special tokens."""
        short = [text for text in texts if len(text) <= self._piece_characters]
        ids_of_short = iter(self._encode_batch(short))
        return [
            next(ids_of_short) if len(text) <= self._piece_characters else self._encode_long(text)
            for text in texts
        ]

    def _encode_batch(self, texts: list[str]) -> list[TokenIds]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [_ids(encoding.ids) for encoding in encodings]

    def _encode_long(self, text: str) -> TokenIds:
        """Piece by piece: an encoding needs 270 bytes a token, the ids alone need 8."""
        pieces = pieces_of(text, self._piece_characters)
        return np.concatenate([self._encode_batch([piece])[0] for piece in pieces])

    def encode_with_offsets(self, texts: list[str]) -> list[Encoding]:
        """Each text whole and without special tokens, with the characters of every token."""
        encodings: list[Encoding] = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return encodings

    def pair_template(self) -> PairTemplate:
        """The special tokens around and between two texts that are read together."""
        return _pair_template_of(self._tokenizer)

    def token_id(self, token: str) -> int | None:
        """The id of a token, or None where the vocabulary has none."""
        return self._tokenizer.token_to_id(token)

    def _finish(self, ids: TokenIds) -> TokenizedText:
        kept = ids[: self.max_length - len(self._template)]
        whole = np.concatenate((self._template.prefix, kept, self._template.suffix))
        return TokenizedText(whole, original_tokens=len(ids) + len(self._template))


def _require_embeddings(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise `StartupError` where a token has no embedding, at which a whole batch would fail."""
    tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    embedded = read_config(folder).get("vocab_size", tokens)
    if tokens > embedded:
        raise StartupError(
            f"the tokenizer in {folder} has {tokens} tokens, and the model only {embedded}: "
            "they are not of one model"
        )


def _template_of(tokenizer: Tokenizer) -> Template:
    """Find the special tokens by looking where a plain text lands between them."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    start = _find(plain, framed)
    return Template(_ids(framed[:start]), _ids(framed[start + len(plain) :]))


def _closed_with(template: Template, closing: str | None, tokenizer: Tokenizer) -> Template:
    if closing is None:
        return template
    token_id = tokenizer.token_to_id(closing)
    if token_id is None:
        raise StartupError(f"the vocabulary has no token {closing}")
    if len(template.suffix) and template.suffix[-1] == token_id:
        return template
    return Template(template.prefix, np.append(template.suffix, token_id))


def _pair_template_of(tokenizer: Tokenizer) -> PairTemplate:
    first = tokenizer.encode("a", add_special_tokens=False).ids
    second = tokenizer.encode("b", add_special_tokens=False).ids
    framed = tokenizer.encode("a", "b", add_special_tokens=True).ids
    start = _find(first, framed)
    rest = framed[start + len(first) :]
    between = _find(second, rest)
    return PairTemplate(
        _ids(framed[:start]), _ids(rest[:between]), _ids(rest[between + len(second) :])
    )


def _find(part: list[int], whole: list[int]) -> int:
    for start in range(len(whole) - len(part) + 1):
        if whole[start : start + len(part)] == part:
            return start
    raise StartupError("tokenizer.json changes the text itself where it adds special tokens")


def _ids(ids: list[int]) -> TokenIds:
    return np.array(ids, dtype=np.int64)
