"""Tokenisation in time and memory that do not grow with the text.

A text is cut at 32 characters for each token of the limit, on the side that the truncation cuts;
what is left is tokenised to its end, and its first or last tokens are kept. Texts are tokenised in
slices of 32,768 characters, which bounds their memory; a slice ends before a space between two
letters, where every tokenizer ends a word, or is cut anywhere if it has none. Of a text that was
cut the number of tokens is a lower bound: those that were counted, and one for the rest.

The model's `tokenizer.json` is read with the tokenizers library. Its calls for batches release the
GIL, and may run in several threads at once; those for one text hold it.
"""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog
from tokenizers import Encoding, Tokenizer, normalizers
from xxhash import xxh3_128_digest

from smart_embedder.errors import StartupError
from smart_embedder.interrupts import stop_if_given_up
from smart_embedder.models.files.config import read_config, read_optional
from smart_embedder.models.files.reading import read_file
from smart_embedder.models.tokenizer_contradictions import (
    as_transformers_reads,
    require_unknown_words,
    template_of,
)
from smart_embedder.requests import CUT_AT_END, Side, TruncationOptions
from smart_embedder.tokens import SpecialToken, TokenIds, TokenizedText, TokenSpans

log = structlog.get_logger(__name__)

# Words that the tokenizers library remembers, up to 15 kB each; ten times as many by default, which
# makes it hardly faster.
_REMEMBERED_WORDS = 1000
_END_IDS = 16
_OFFSETS_AT_ONCE = 4096
CHARACTERS_PER_TOKEN = 32
# They take at most 40 MB to tokenise. U+FDFA, which becomes 18 characters under NFKC, makes a slice
# count four times; no other character becomes more than eight.
SLICE_CHARACTERS = 32_768
_GROWING, _GROWTH = "\ufdfa", 4
_BORDER = re.compile(r"(?s:.*)[^\W_](?= [^\W_])")

# Truncation and padding, at the beginning of a tokenizer's file.
_LIMITS = re.compile(rb'"(?:truncation|padding)"\s*:\s*(?:null|\{(?:[^{}]|\{[^{}]*\})*\})\s*,?\s*')
_BEGINNING = 4096

NO_IDS = np.array([], dtype=np.int64)
# By the content of their files, so that none is taken for another that was put in its place.
_parsed_ahead: dict[bytes, "Future[Tokenizer]"] = {}


@contextmanager
def parsed_ahead(paths: Iterable[Path]) -> Iterator[None]:
    """Parse these files on a thread of its own, for every `TextTokenizer.from_folder` within.

    Errors are raised there, too. The tokenizers library holds the GIL for most of the time.
    """
    threads = ThreadPoolExecutor(1, thread_name_prefix="parse-ahead")
    for path in filter(Path.is_file, paths):
        with suppress(OSError, StartupError):
            content = read_file(path)
            if content not in _parsed_ahead:
                _parsed_ahead[content] = threads.submit(_parse, content)
    try:
        yield
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        _parsed_ahead.clear()


def _parse(content: bytes) -> Tokenizer:
    return Tokenizer.from_buffer(content)


def cut_text(text: str, tokens: int, side: Side = "right") -> str:
    """The text, cut from `side` to the most characters that are tokenised for so many tokens."""
    most = CHARACTERS_PER_TOKEN * tokens
    return text[:most] if side == "right" else text[max(0, len(text) - most) :]


@dataclass(slots=True)
class TruncatedTokens:
    """The token ids of a text, at most `limit`: the first, or the last if `side` left is cut.

    It has `total` ids, or at least so many where not `exact`. `first` and `last` hold those at its
    ends, kept or not, as many as begin or end a template, and nothing of an end that was cut off.
    """

    limit: int
    side: Side = "right"
    total: int = 0
    exact: bool = True
    ids: TokenIds = field(default_factory=lambda: NO_IDS)
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)

    @property
    def kept(self) -> int:
        """How many ids were kept."""
        return len(self.ids)

    def add(self, ids: list[int]) -> None:
        """Add the next ids of the text."""
        self.total += len(ids)
        self.first = (self.first + ids[:_END_IDS])[:_END_IDS]
        self.last = (self.last + ids[-_END_IDS:])[-_END_IDS:]
        if self.side == "left":
            joined = np.concatenate((self.ids, np.array(ids, np.int64)))
            self.ids = joined[max(0, len(joined) - self.limit) :]
        elif self.kept < self.limit:
            more = np.array(ids[: self.limit - self.kept], np.int64)
            self.ids = np.concatenate((self.ids, more))

    def begin_with(self, ids: list[int]) -> None:
        """Keep these ids of the text's beginning, in place of the first kept ones."""
        self.ids = np.concatenate((np.array(ids[: self.limit], np.int64), self.ids[len(ids) :]))


class TextTokenizer:
    """Turns texts into the token ids of one model, cut to `max_length`.

    `closing` is a token that must end every text, whether the file's own template adds it or not.
    Texts are tokenised in slices of `slice_characters`. `digest` is that of what decides which
    tokens a text has.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        *,
        closing: str | None = None,
        slice_characters: int = SLICE_CHARACTERS,
        digest: bytes = b"",
    ) -> None:
        self.pads_left = (tokenizer.padding or {}).get("direction") == "left"
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if hasattr(tokenizer.model, "_resize_cache"):  # Unigram and BPE, which have no public name.
            # An attacker's long words would fill the library's cache with 150 MB.
            tokenizer.model._resize_cache(_REMEMBERED_WORDS)  # noqa: SLF001
        self._tokenizer = tokenizer
        self._slice_characters = slice_characters
        self._prefix, self._suffix = template_of(tokenizer, "a")
        if closing is not None:
            token_id = tokenizer.token_to_id(closing)
            if token_id is None:
                raise StartupError(f"the vocabulary has no token {closing}")
            if token_id not in self._suffix[-1:]:
                self._suffix = np.append(self._suffix, token_id)
        self.max_length = max_length
        self.vocabulary_size = tokenizer.get_vocab_size()
        self.digest = digest
        self._frame = len(self._prefix) + len(self._suffix)
        if max_length <= self._frame:
            raise StartupError(
                f"a length limit of {max_length} tokens leaves no room for text beside the "
                f"{self._frame} special tokens of this model"
            )

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        max_length: int,
        *,
        closing: str | None = None,
        lower_case: bool = False,
        slice_characters: int = SLICE_CHARACTERS,
    ) -> "TextTokenizer":
        """Read `tokenizer.json`; raises `StartupError` where it cannot be, or is another's."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise StartupError(f"{folder} holds no tokenizer.json")
        try:
            content = read_file(path)
            ahead = _parsed_ahead.pop(content, None)
            parsed = _parse(content) if ahead is None else ahead.result()
            tokenizer = as_transformers_reads(parsed, content, folder)
            _require_embeddings(tokenizer, folder)
            _require_one_reading(tokenizer, folder)
            require_unknown_words(tokenizer)
            how: tuple[object, ...]
            how = (lower_case, closing, None if tokenizer is parsed else tokenizer.to_str())
            if tokenizer.encode_special_tokens:
                how = (*how, "split_special_tokens")
            if lower_case:
                own, lower = tokenizer.normalizer, normalizers.Lowercase()
                tokenizer.normalizer = lower if own is None else normalizers.Sequence([lower, own])
            # Limits are not used, but rewritten.
            content = _LIMITS.sub(b"", content[:_BEGINNING]) + content[_BEGINNING:]
            digest = xxh3_128_digest(content + repr(how).encode())
            return cls(
                tokenizer,
                max_length,
                closing=closing,
                slice_characters=slice_characters,
                digest=digest,
            )
        except StartupError:
            raise
        except Exception as error:  # The tokenizers library raises bare Exception.
            raise StartupError(f"{path} cannot be read: {error}") from error

    def encode(
        self, texts: list[str], prompt: str = "", truncation: TruncationOptions = CUT_AT_END
    ) -> list[TokenizedText]:
        """Token ids of each text behind `prompt`, with special tokens; neither of these is cut.

        A text without a token, of a model without special ones, is read as token 0.
        """
        limit = self.max_length - self._frame
        if truncation.max_tokens is not None:
            limit = min(limit, truncation.max_tokens)
        tokenized: list[TokenizedText] = []
        for text in self.encode_plain(texts, limit, truncation.side, prompt):
            ids, total = np.concatenate((self._prefix, text.ids, self._suffix)), text.total
            if not len(ids):  # A forward needs at least one token.
                ids, total = np.zeros(1, dtype=np.int64), total + 1
            tokenized.append(TokenizedText(ids, total + self._frame, text.exact))
        return tokenized

    def encode_plain(
        self, texts: list[str], limit: int, side: Side = "right", prompt: str = ""
    ) -> list[TruncatedTokens]:
        """At most `limit` token ids of each text behind `prompt`, without special tokens."""
        truncated = [TruncatedTokens(limit, side) for _ in texts]
        read: list[str] = []
        for text, tokens in zip(texts, truncated, strict=True):
            if side == "left":  # The prompt is kept.
                part = prompt + cut_text(text, max(1, limit), side)
            else:
                part = cut_text(prompt + text, max(1, limit))
            tokens.exact = len(part) == len(prompt) + len(text)
            read.append(part)
        for owners, slices in self._batches(read, truncated):
            encodings = self._tokenizer.encode_batch_fast(slices, add_special_tokens=False)
            for tokens, encoding in zip(owners, encodings, strict=True):
                tokens.add(encoding.ids)
        for text, tokens in zip(read, truncated, strict=True):
            if prompt and side == "left" and tokens.total > limit:
                tokens.begin_with(self._ids_of_prompt(prompt, text))
            if not tokens.exact:
                tokens.total += 1
                unread = tokens.first if side == "left" else tokens.last
                unread.clear()
        return truncated

    def _batches(
        self, texts: list[str], truncated: list[TruncatedTokens]
    ) -> Iterator[tuple[list[TruncatedTokens], list[str]]]:
        """The tokens of texts, and slices of those, together no larger than one slice may be."""
        owners: list[TruncatedTokens] = []
        slices: list[str] = []
        left = self._slice_characters
        for text, tokens in zip(texts, truncated, strict=True):
            for text_slice in self._slices(text):
                size = len(text_slice) * (_GROWTH if _GROWING in text_slice else 1)
                if size > left and slices:
                    yield owners, slices
                    stop_if_given_up()
                    owners, slices, left = [], [], self._slice_characters
                owners.append(tokens)
                slices.append(text_slice)
                left -= size
        if slices:
            yield owners, slices

    def _slices(self, text: str) -> Iterator[str]:
        begin = 0
        while begin < len(text):
            stop = begin + self._slice_characters
            if _GROWING in text[begin:stop]:
                stop = begin + max(1, self._slice_characters // _GROWTH)
            # The space of a border may be the first character behind the slice.
            border = _BORDER.match(text, begin, stop + 2) if stop < len(text) else None
            stop = border.end() if border else stop
            yield text[begin:stop]
            begin = stop

    def _encode(self, text_slice: str) -> Encoding:
        """Ids and offsets of one slice."""
        (encoding,) = self._tokenizer.encode_batch([text_slice], add_special_tokens=False)
        return encoding

    def _ids_of_prompt(self, prompt: str, text: str) -> list[int]:
        """The ids of the tokens that begin within the prompt, with which the text begins."""
        ids: list[int] = []
        begin, end = 0, len(prompt.rstrip())
        for text_slice in self._slices(text):
            encoding = self._encode(text_slice)
            starts = [begin + start for start, _ in encoding.offsets]
            ids += [each for each, start in zip(encoding.ids, starts, strict=True) if start < end]
            begin += len(text_slice)
            if begin >= end:
                break
        return ids

    def spans(self, text: str) -> Iterator[TokenSpans]:
        """The tokens of the whole text, and the characters they stand for, slice by slice."""
        begin = 0
        for text_slice in self._slices(text):
            stop_if_given_up()
            encoding = self._encode(text_slice)
            pairs = encoding.offsets
            offsets = np.empty((len(pairs), 2), dtype=np.int64)
            # NumPy holds the GIL while it reads a list: the event loop runs between the parts.
            for start in range(0, len(pairs), _OFFSETS_AT_ONCE):
                part = slice(start, start + _OFFSETS_AT_ONCE)
                offsets[part] = pairs[part]
            offsets += begin
            yield TokenSpans(np.array(encoding.ids, np.int64), offsets[:, 0], offsets[:, 1])
            begin += len(text_slice)

    @property
    def special_tokens(self) -> tuple[list[SpecialToken], list[SpecialToken]]:
        """Those before, and those after, every text."""
        before, after = (
            list(map(SpecialToken, ids.tolist(), self.token_strings(ids)))
            for ids in (self._prefix, self._suffix)
        )
        return before, after

    def pair_template(self) -> list[TokenIds]:
        """The special tokens before, between and after two texts that are read together."""
        return template_of(self._tokenizer, "a", "b")

    def token_strings(self, ids: TokenIds) -> list[str]:
        """The strings of these tokens in the vocabulary."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids.tolist()]

    def token_id(self, token: str) -> int | None:
        """The id of a token, or None where the vocabulary has none."""
        return self._tokenizer.token_to_id(token)


def _require_embeddings(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise `StartupError` where a token has no embedding, at which a whole batch would fail."""
    tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    embedded = read_config(folder).get("vocab_size", tokens)
    if tokens > embedded:
        raise StartupError(
            f"the tokenizer in {folder} has {tokens} tokens, and the model only {embedded}: "
            "they are not of one model"
        )


def _require_one_reading(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise `StartupError` for a tokenizer that draws lots, and log which end it would cut."""
    if getattr(tokenizer.model, "dropout", None):
        raise StartupError(
            f"the tokenizer in {folder} reads a text otherwise each time (dropout in "
            "tokenizer.json): set it to null"
        )
    side = read_optional(folder / "tokenizer_config.json").get("truncation_side")
    if (side or (tokenizer.truncation or {}).get("direction")) == "left":
        log.warning(
            "truncation_side_not_followed",
            model=folder.name,
            detail="its tokenizer cuts long texts at their beginning (truncation_side); here they "
            "are cut at their end where a request does not say otherwise",
        )
