"""Tokenizes texts in time and memory that do not grow with the text.

A text is cut at 32 characters for each token of the limit, on the side that its truncation cuts.
The rest is tokenized to its end, and its first or last tokens are kept. The token count of a text
that was cut is a lower bound: the tokens that were counted, and one for the rest.

Texts are tokenized in slices of 32,768 characters, which bounds their memory. A slice ends before a
space between two letters, where every tokenizer ends a word, and the text has the same tokens as a
whole. Without such a space the slice ends anywhere, and tokens beside its end may differ. Many
tokenizers put a sign in front of what they are given, so a slice that does not begin its text is
tokenized behind a letter or a full stop, whose tokens are dropped.

The calls of the tokenizers library for batches release the GIL, and may run in several threads at
once; its calls for one text hold the GIL.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from tokenizers import Encoding, Tokenizer
from xxhash import xxh3_128_digest

from smart_embedder.errors import StartupError
from smart_embedder.interrupts import stop_if_given_up
from smart_embedder.models.files.chat_template import ProcessorFrame, TextFrame
from smart_embedder.models.tokenizer_files import read_tokenizer
from smart_embedder.requests import CUT_AT_END, Side, TruncationOptions
from smart_embedder.tokens import SpecialToken, TokenCount, TokenIds, TokenizedText, TokenSpans

# Words in the cache of the tokenizers library, of up to 15 kB each. Its default is ten times as
# many, which is hardly faster.
_CACHED_WORDS = 1000
# Ids that are kept of a text's beginning: at least those of a template there.
_FIRST_IDS = 16
_OFFSETS_AT_ONCE = 4096
CHARACTERS_PER_TOKEN = 32
# A slice takes at most 40 MB to tokenize. U+FDFA, which becomes 18 characters under NFKC, makes a
# slice count nine times; no other character becomes more than eight.
SLICE_CHARACTERS = 32_768
_GROWING, _GROWTH = "\ufdfa", 9
_SLICE_END = re.compile(r"(?s:.*)[^\W_](?= [^\W_])")
# The first of these that forms no token with the beginning of a slice is put in front of it.
_CONTEXTS = ("a", "\u3002")

NO_IDS = np.array([], dtype=np.int64)
NO_LIMIT = 2**31


def cut_text(text: str, tokens: int, side: Side = "right") -> str:
    """Cut a text on `side`, to the characters that are tokenized for this limit of tokens."""
    limit = CHARACTERS_PER_TOKEN * tokens
    return text[:limit] if side == "right" else text[max(0, len(text) - limit) :]


@dataclass(slots=True)
class TruncatedTokens:
    """The first `limit` token ids of a text, or the last if it is cut on the left `side`.

    The text has `total` ids, or at least as many if not `exact`. `first` holds ids of its
    beginning, kept or not, and is empty if that was cut off before tokenization.
    """

    limit: int
    side: Side = "right"
    total: int = 0
    exact: bool = True
    ids: TokenIds = field(default_factory=lambda: NO_IDS)
    first: list[int] = field(default_factory=list)

    @property
    def kept(self) -> int:
        """The number of kept ids."""
        return len(self.ids)

    @property
    def count(self) -> TokenCount:
        """The numbers of ids before and after the cut."""
        return TokenCount(self.total, self.kept, self.exact)

    def add(self, ids: list[int]) -> None:
        """Add the next ids of the text."""
        self.total += len(ids)
        if self.exact or self.side == "right":
            self.first = (self.first + ids[:_FIRST_IDS])[:_FIRST_IDS]
        if self.side == "left":
            joined = np.concatenate((self.ids, np.array(ids, np.int64)))
            self.ids = joined[max(0, len(joined) - self.limit) :]
        elif self.kept < self.limit:
            more = np.array(ids[: self.limit - self.kept], np.int64)
            self.ids = np.concatenate((self.ids, more))

    def begin_with(self, ids: list[int]) -> None:
        """Replace the first kept ids by these, from the text's beginning."""
        self.ids = np.concatenate((np.array(ids[: self.limit], np.int64), self.ids[len(ids) :]))


class TextTokenizer:
    """Turns texts into the token ids of one model, cut to `max_length`.

    `closing` is a token that ends every text, even if the template in the file does not add it. A
    `frame` is what stands around every text, in place of special tokens or within them.
    Texts are tokenized in slices of `slice_characters`. `digest` identifies everything that decides
    which tokens a text has.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        *,
        closing: str | None = None,
        slice_characters: int = SLICE_CHARACTERS,
        digest: bytes = b"",
        frame: TextFrame | None = None,
    ) -> None:
        self.pads_left = (tokenizer.padding or {}).get("direction") == "left"
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if hasattr(tokenizer.model, "_resize_cache"):  # Of Unigram and BPE; there is no public one.
            # An attacker's long words would fill the library's cache with 150 MB.
            tokenizer.model._resize_cache(_CACHED_WORDS)  # noqa: SLF001
        self._tokenizer = tokenizer
        self._slice_characters = slice_characters
        encodings = tokenizer.encode_batch_fast(_CONTEXTS, add_special_tokens=False)
        self._contexts = {
            context: encoding.ids
            for context, encoding in zip(_CONTEXTS, encodings, strict=True)
            if encoding.ids
        }
        self._prefix, self._suffix = find_template(tokenizer, "a")
        if closing is not None:
            token_id = tokenizer.token_to_id(closing)
            if token_id is None:
                raise StartupError(f"the vocabulary has no token {closing}")
            if token_id not in self._suffix[-1:]:
                self._suffix = np.append(self._suffix, token_id)
        self._frame, self.digest = frame, digest
        if frame is not None:
            end = _find_end(tokenizer, frame)
            if isinstance(frame, ProcessorFrame):
                self._suffix = np.concatenate((end, self._suffix))
            else:
                self._prefix, self._suffix = NO_IDS, end
            self.digest = xxh3_128_digest(digest + repr(frame).encode())
        self.max_length = max_length
        self.vocabulary_size = tokenizer.get_vocab_size()
        self._special_count = len(self._prefix) + len(self._suffix)
        if max_length <= self._special_count:
            raise StartupError(
                f"a length limit of {max_length} tokens leaves no room for text beside the "
                f"{self._special_count} special tokens of this model"
            )

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        max_length: int,
        *,
        closing: str | None = None,
        lower_case: bool = False,
        **options: Any,
    ) -> Self:
        """Read `tokenizer.json`; raises `StartupError` if it is unusable or of another model."""
        tokenizer, digest = read_tokenizer(folder, closing=closing, lower_case=lower_case)
        return cls(tokenizer, max_length, closing=closing, digest=digest, **options)

    def encode(
        self, texts: list[str], prompt: str = "", truncation: TruncationOptions = CUT_AT_END
    ) -> list[TokenizedText]:
        """Tokenize each text after `prompt`, with special tokens, to at most the model's limit.

        A text without any token, of a model without special tokens, is read as token 0.
        """
        limit, in_frame = self.max_length - self._special_count, 0
        if self._frame is not None:
            (before,) = self.encode_plain([self._frame.begin("")], limit)
            prompt, in_frame = self._frame.begin(prompt), before.kept
        limit = in_frame + truncation.lower(limit - in_frame)
        tokenized: list[TokenizedText] = []
        for text in self.encode_plain(texts, limit, truncation.side, prompt):
            ids, total = np.concatenate((self._prefix, text.ids, self._suffix)), text.total
            if not len(ids):  # A forward needs at least one token.
                ids, total = np.zeros(1, dtype=np.int64), total + 1
            tokenized.append(TokenizedText(ids, total + self._special_count, text.exact))
        return tokenized

    def encode_plain(
        self, texts: list[str], limit: int, side: Side = "right", prompt: str = ""
    ) -> list[TruncatedTokens]:
        """Tokenize each text after `prompt` to at most `limit` ids, without special tokens."""
        truncated = [TruncatedTokens(limit, side) for _ in texts]
        cut_texts: list[str] = []
        for text, tokens in zip(texts, truncated, strict=True):
            if side == "left":  # The prompt is kept.
                cut = prompt + cut_text(text, max(1, limit), side)
            else:
                cut = cut_text(prompt + text, max(1, limit))
            tokens.exact = len(cut) == len(prompt) + len(text)
            cut_texts.append(cut)
        slices = [self._slices(text) for text in cut_texts]
        beginnings = (
            (tokens, text_slice)
            for tokens, rest in zip(truncated, slices, strict=True)
            if tokens.exact or side == "right" or prompt
            for text_slice in islice(rest, 1)
        )
        for batch in self._batches(beginnings):
            stop_if_given_up()
            texts = [text_slice for _, text_slice in batch]
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for (tokens, _), encoding in zip(batch, encodings, strict=True):
                tokens.add(encoding.ids)
        for tokens, rest in zip(truncated, slices, strict=True):
            for text_slice in rest:
                encoding, skipped, _ = self._encode_slice(text_slice, self._contexts)
                tokens.add(encoding.ids[skipped:])
        for cut, tokens in zip(cut_texts, truncated, strict=True):
            if prompt and side == "left" and tokens.total > limit:
                tokens.begin_with(self._find_prompt_ids(prompt, cut))
            if not tokens.exact:
                tokens.total += 1
        return truncated

    def _batches(
        self, slices: Iterable[tuple[TruncatedTokens, str]]
    ) -> Iterator[list[tuple[TruncatedTokens, str]]]:
        """Group slices that together are no larger than one may be, with the texts they are of."""
        batch: list[tuple[TruncatedTokens, str]] = []
        left = self._slice_characters
        for tokens, text_slice in slices:
            size = len(text_slice) * (_GROWTH if _GROWING in text_slice else 1)
            if size > left and batch:
                yield batch
                batch, left = [], self._slice_characters
            batch.append((tokens, text_slice))
            left -= size
        if batch:
            yield batch

    def _slices(self, text: str) -> Iterator[str]:
        begin = 0
        while begin < len(text):
            stop = begin + self._slice_characters
            if _GROWING in text[begin:stop]:
                stop = begin + max(1, self._slice_characters // _GROWTH)
            # The space may be the first character behind the slice.
            end = _SLICE_END.match(text, begin, stop + 2) if stop < len(text) else None
            stop = end.end() if end else stop
            yield text[begin:stop]
            begin = stop

    def _encode_slice(
        self, text_slice: str, contexts: Mapping[str, list[int]], *, with_offsets: bool = False
    ) -> tuple[Encoding, int, int]:
        """Tokenize a slice behind one of these contexts, or alone if all form tokens with it.

        Returns the numbers of ids and characters of the context too.
        """
        stop_if_given_up()
        encode = self._tokenizer.encode_batch if with_offsets else self._tokenizer.encode_batch_fast
        for context, ids in contexts.items():
            (encoding,) = encode([context + text_slice], add_special_tokens=False)
            if encoding.ids[: len(ids)] == ids:
                return encoding, len(ids), len(context)
        (encoding,) = encode([text_slice], add_special_tokens=False)
        return encoding, 0, 0

    def _find_prompt_ids(self, prompt: str, text: str) -> list[int]:
        """Return the ids of the tokens that begin within the prompt at the start of `text`."""
        ids: list[int] = []
        end = len(prompt.rstrip())
        for spans in self.spans(text):
            ids += spans.ids[spans.starts < end].tolist()
            if (spans.starts >= end).any():
                break
        return ids

    def spans(self, text: str) -> Iterator[TokenSpans]:
        """Yield the tokens of the whole text, and the characters they stand for, by slice."""
        begin = 0
        for text_slice in self._slices(text):
            contexts = self._contexts if begin else {}
            encoding, skipped, characters = self._encode_slice(
                text_slice, contexts, with_offsets=True
            )
            pairs = encoding.offsets
            offsets = np.empty((len(pairs), 2), dtype=np.int64)
            # NumPy holds the GIL while it reads a list. The event loop runs between the parts.
            for start in range(0, len(pairs), _OFFSETS_AT_ONCE):
                part = slice(start, start + _OFFSETS_AT_ONCE)
                offsets[part] = pairs[part]
            offsets = offsets[skipped:] + (begin - characters)
            ids = np.array(encoding.ids[skipped:], np.int64)
            yield TokenSpans(ids, offsets[:, 0], offsets[:, 1])
            begin += len(text_slice)

    @property
    def marks_continuations(self) -> bool:
        """Whether tokens that continue a word have a prefix, such as `##`."""
        return bool(getattr(self._tokenizer.model, "continuing_subword_prefix", None))

    @property
    def special_tokens(self) -> tuple[list[SpecialToken], list[SpecialToken]]:
        """The special tokens before, and those after, every text."""
        before, after = (
            list(map(SpecialToken, ids.tolist(), self.token_strings(ids)))
            for ids in (self._prefix, self._suffix)
        )
        return before, after

    def pair_template(self) -> list[TokenIds]:
        """Return the special tokens before, between and after the two texts of a pair."""
        return find_template(self._tokenizer, "a", "b")

    def pair_segments(self) -> list[int]:
        """Return the segment of each part of a pair: special tokens, text, and so on, five parts.

        Raises `StartupError` if the special tokens of one part have several.
        """
        found = self._tokenizer.encode("a", "b").type_ids
        prefix, middle, suffix = map(len, self.pair_template())
        texts = [len(self._tokenizer.encode(text, add_special_tokens=False)) for text in ("a", "b")]
        segments, start = [], 0
        for length in (prefix, texts[0], middle, texts[1], suffix):
            part = set(found[start : start + length])
            if len(part) > 1 or not part <= {0, 1}:
                raise StartupError(
                    "tokenizer.json gives the tokens of a pair more than two segments, which is "
                    "not supported"
                )
            segments.append(max(part, default=0))
            start += length
        return segments

    def token_strings(self, ids: TokenIds) -> list[str]:
        """Look up the strings of these tokens in the vocabulary."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids.tolist()]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks it."""
        return self._tokenizer.token_to_id(token)


def find_template(tokenizer: Tokenizer, first: str, second: str | None = None) -> list[TokenIds]:
    """Find the special tokens before, between and after these plain texts, by tokenizing them."""
    rest: list[int] = tokenizer.encode(first, second, add_special_tokens=True).ids
    template: list[list[int]] = []
    for text in (first,) if second is None else (first, second):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        starts = range(len(rest) - len(ids) + 1)
        start = next((start for start in starts if rest[start : start + len(ids)] == ids), None)
        if start is None:
            raise StartupError(
                "tokenizer.json changes the text itself where it adds special tokens"
            )
        template.append(rest[:start])
        rest = rest[start + len(ids) :]
    return [np.array(ids, np.int64) for ids in (*template, rest)]


def _find_end(tokenizer: Tokenizer, frame: TextFrame) -> TokenIds:
    """Find the tokens behind every text; raises `StartupError` if some depend on the text."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    end = encode(frame.behind)
    for text in ("", "a", "a.", "a ", "a\n"):
        begin = frame.before + text
        if encode(begin + frame.behind) != [*encode(begin), *end]:
            raise StartupError(
                "the chat template ends each text with signs that are no tokens of their own, "
                "which is not supported"
            )
    return np.array(end, np.int64)
