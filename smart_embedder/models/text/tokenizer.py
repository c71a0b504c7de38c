"""Tokenisation in time and memory that do not grow with the text.

The model's `tokenizer.json` is read with the tokenizers library. Its calls for batches release the
GIL, and may run in several threads at once; those for one text hold it, 50 ms for one slice. A text
is tokenised slice by slice, from the end if its beginning is cut. Only the ids that the model reads
are kept; the others are counted. Far beyond the model's limit a text is not read any further, and
its number of tokens is a lower bound.
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

from smart_embedder.engine.records import (
    CUT_AT_END,
    Side,
    SpecialToken,
    TokenIds,
    TokenizedText,
    TokenSpans,
    TruncationOptions,
)
from smart_embedder.engine.scheduling.admission import normalization_growth, stop_if_given_up
from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint.config import read_config, read_optional
from smart_embedder.models.checkpoint.reading import read_file
from smart_embedder.models.text.contradictions import (
    as_transformers_reads,
    require_unknown_words,
    template_of,
)
from smart_embedder.models.text.slices import SLICE_CHARACTERS, RunShortener, Slicer

log = structlog.get_logger(__name__)

# Words that the tokenizers library remembers, up to 15 kB each; ten times as many by default, which
# makes it hardly faster.
_REMEMBERED_WORDS = 1000
_END_IDS = 16
_OFFSETS_AT_ONCE = 4096
# Tokens that are counted beyond those that are kept: about as long as a forward of bge-m3's 8,192
# takes on a GPU.
COUNTED_TOKENS = 65_536


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


@dataclass(slots=True)
class TruncatedTokens:
    """The token ids of a text, at most `limit`: the first, or the last if `side` left is cut.

    It has `total` ids, or more where not `exact`. Where `exact`, `first` and `last` hold those at
    its ends, kept or not, as many as begin or end a template.
    """

    limit: int
    side: Side = "right"
    total: int = 0
    exact: bool = True
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    _parts: list[TokenIds] = field(default_factory=list)

    @property
    def ids(self) -> TokenIds:
        """The kept ids, `[tokens]`."""
        return np.concatenate([NO_IDS, *self._parts])

    @property
    def kept(self) -> int:
        """How many ids were kept."""
        return min(self.total, self.limit)

    def take(self, before: TokenIds, after: TokenIds) -> TokenIds:
        """The kept ids between these, `[tokens]`; they are not kept any longer."""
        ids = np.concatenate([before, *self._parts, after])
        self._parts.clear()
        return ids

    def add(self, ids: list[int]) -> None:
        """Add the next ids of the text, which precede the others if `side` is left."""
        left = self.limit - self.total
        if self.side == "right":
            if left > 0:
                self._parts.append(np.array(ids[:left], np.int64))
            self.first = (self.first + ids[:_END_IDS])[:_END_IDS]
            self.last = (self.last + ids[-_END_IDS:])[-_END_IDS:]
        else:
            if left > 0:
                self._parts.insert(0, np.array(ids[-left:], np.int64))
            self.first = (ids[:_END_IDS] + self.first)[:_END_IDS]
            self.last = (ids[-_END_IDS:] + self.last)[-_END_IDS:]
        self.total += len(ids)

    def begin_with(self, ids: list[int]) -> None:
        """Keep these ids of the text's beginning, in place of the first kept ones."""
        self._parts = [np.array(ids[: self.limit], np.int64), self.ids[len(ids) :]]


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
        self._slicer = Slicer(tokenizer, slice_characters)
        self._shortener = RunShortener(tokenizer)
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
            ids = text.take(self._prefix, self._suffix)
            if len(ids):
                tokenized.append(TokenizedText(ids, text.total + self._frame, text.exact))
            else:  # A forward needs at least one token.
                tokenized.append(TokenizedText(np.zeros(1, dtype=np.int64), 1))
        return tokenized

    def encode_plain(
        self, texts: list[str], limit: int, side: Side = "right", prompt: str = ""
    ) -> list[TruncatedTokens]:
        """At most `limit` token ids of each text behind `prompt`, without special tokens."""
        truncated = [TruncatedTokens(limit, side) for _ in texts]
        for owners, slices in self._batches(texts, truncated, prompt):
            encodings = self._tokenizer.encode_batch_fast(slices, add_special_tokens=False)
            for tokens, encoding in zip(owners, encodings, strict=True):
                tokens.add(encoding.ids)
        if prompt and side == "left":
            for text, tokens in zip(texts, truncated, strict=True):
                if tokens.total > limit:
                    tokens.begin_with(self._ids_of_prompt(prompt, text))
        return truncated

    def _batches(
        self, texts: list[str], truncated: list[TruncatedTokens], prompt: str
    ) -> Iterator[tuple[list[TruncatedTokens], list[str]]]:
        """The tokens of texts, and slices of those, together no larger than one slice may be."""
        owners: list[TruncatedTokens] = []
        slices: list[str] = []
        left = self._slicer.characters
        for text, tokens in zip(texts, truncated, strict=True):
            for text_slice in self._slicer.slices(prompt + text, from_end=tokens.side == "left"):
                stop_if_given_up()
                if tokens.total >= tokens.limit + COUNTED_TOKENS:
                    tokens.exact = False
                    break
                short = self._shortener.shorten(text_slice)
                size = len(short) * normalization_growth(short)
                if size > left and slices:
                    yield owners, slices
                    owners, slices, left = [], [], self._slicer.characters
                owners.append(tokens)
                slices.append(short)
                left -= size
        if slices:
            yield owners, slices

    def _encode(self, text_slice: str) -> Encoding:
        """Ids and offsets of one slice."""
        (encoding,) = self._tokenizer.encode_batch([text_slice], add_special_tokens=False)
        return encoding

    def _ids_of_prompt(self, prompt: str, text: str) -> list[int]:
        """The ids of the tokens that begin within the prompt when it precedes the text."""
        ids: list[int] = []
        begin, end = 0, len(prompt.rstrip())
        for text_slice in self._slicer.slices(prompt + text):
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
        for text_slice in self._slicer.slices(text):
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
