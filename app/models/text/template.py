"""The special tokens around a text or a pair, found by tokenising one."""

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from app.engine.types import TokenIds
from app.errors import StartupError


@dataclass(frozen=True, slots=True)
class Template:
    """The special tokens before and after a text."""

    prefix: TokenIds
    suffix: TokenIds

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The special tokens before, between and after two texts."""

    prefix: TokenIds
    middle: TokenIds
    suffix: TokenIds

    def __len__(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)


def template_of(tokenizer: Tokenizer) -> Template:
    """Find the special tokens by the position of a plain text between them."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    start = _find(plain, framed)
    return Template(ids_of(framed[:start]), ids_of(framed[start + len(plain) :]))


def closed_with(template: Template, closing: str | None, tokenizer: Tokenizer) -> Template:
    """The template with the token `closing` at its end, if it is not there already."""
    if closing is None:
        return template
    token_id = tokenizer.token_to_id(closing)
    if token_id is None:
        raise StartupError(f"the vocabulary has no token {closing}")
    if len(template.suffix) and template.suffix[-1] == token_id:
        return template
    return Template(template.prefix, np.append(template.suffix, token_id))


def pair_template_of(tokenizer: Tokenizer) -> PairTemplate:
    """Find the special tokens by the positions of two plain texts between them."""
    first = tokenizer.encode("a", add_special_tokens=False).ids
    second = tokenizer.encode("b", add_special_tokens=False).ids
    framed = tokenizer.encode("a", "b", add_special_tokens=True).ids
    start = _find(first, framed)
    behind_first = framed[start + len(first) :]
    between = _find(second, behind_first)
    return PairTemplate(
        ids_of(framed[:start]),
        ids_of(behind_first[:between]),
        ids_of(behind_first[between + len(second) :]),
    )


def _find(tokens: list[int], whole: list[int]) -> int:
    for start in range(len(whole) - len(tokens) + 1):
        if whole[start : start + len(tokens)] == tokens:
            return start
    raise StartupError("tokenizer.json changes the text itself where it adds special tokens")


def ids_of(ids: list[int]) -> TokenIds:
    """The ids as an array."""
    return np.array(ids, dtype=np.int64)


NO_IDS = ids_of([])
