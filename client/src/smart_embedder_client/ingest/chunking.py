"""Texts into chunks of so many tokens, at headings, paragraphs and sentences where it can be."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from smart_embedder_client.ingest.pace import batches
from smart_embedder_client.ingest.sources import SourceError

CountTokens = Callable[[Sequence[str]], Sequence[int]]

_TEXTS_PER_REQUEST, _CHARACTERS_PER_REQUEST = 128, 500_000
_LONGEST_PIECE = 10_000
# About 5 MB. Texts full of numbers have new words without end.
_REMEMBERED_WORDS, _REMEMBERED_CHARACTERS = 30_000, 1_000_000
# The beginning and the end that the models add to a text.
SPECIAL_TOKENS = 2


class StoppedError(Exception):
    """The run has ended, so that nobody waits for what is counted or split."""


class TokenCounter:
    """Counts as the tokenizers of bge-m3 and BERT do, which never join words at white space.

    So the tokens of a text are those of its words, and the service is asked for the words that it
    has not counted yet. Special tokens are left out.
    """

    def __init__(self, count: CountTokens) -> None:
        self._count = count
        self._known: dict[str, int] = {}
        self._characters = 0
        self._stopped = False

    def stop(self) -> None:
        """Have what counts in another thread raise StoppedError."""
        self._stopped = True

    def prepare(self, texts: Iterable[str]) -> None:
        """Count the words of many texts, in few requests."""
        if len(self._known) > _REMEMBERED_WORDS or self._characters > _REMEMBERED_CHARACTERS:
            self._known.clear()
            self._characters = 0
        words = {piece: None for text in texts for piece in _pieces(text)}
        self._learn([word for word in words if word not in self._known])

    def count(self, text: str) -> int:
        """The number of tokens of one text."""
        if self._stopped:
            raise StoppedError
        pieces = _pieces(text)
        unknown = list(dict.fromkeys(piece for piece in pieces if piece not in self._known))
        if unknown:
            self._learn(unknown)
        return sum(self._known[piece] for piece in pieces)

    def _learn(self, words: Sequence[str]) -> None:
        most = _CHARACTERS_PER_REQUEST
        for request in batches(words, len, lambda: most, _TEXTS_PER_REQUEST):
            if self._stopped:
                raise StoppedError
            self._known.update(zip(request, self._count(request), strict=True))
            self._characters += sum(map(len, request))


def _pieces(text: str) -> list[str]:
    """Its words; what is written without spaces is cut, far above the length of words."""
    return [
        word[start : start + _LONGEST_PIECE]
        for word in text.split()
        for start in range(0, len(word), _LONGEST_PIECE)
    ]


class ServiceChunker:
    """Counts tokens by asking the service, for each word once: by `Client.count_tokens`.

    A chunk has at most `tokens`, special ones included, and repeats `overlap` of the one before.
    """

    def __init__(self, count: CountTokens, tokens: int = 512, overlap: int = 64) -> None:
        self._counter = TokenCounter(count)
        self._capacity = tokens - SPECIAL_TOKENS
        arguments = (self._counter.count, self._capacity, overlap)
        self._text = TextSplitter.from_callback(*arguments)
        self._markdown = MarkdownSplitter.from_callback(*arguments)

    def prepare(self, texts: Iterable[str]) -> None:
        """Have the words of all texts counted in few requests."""
        self._counter.prepare(texts)

    def split(self, text: str, *, is_markdown: bool = False) -> list[str]:
        """Its chunks, in order, without white space around them."""
        if self._counter.count(text) <= self._capacity:
            return [text.strip()]
        return (self._markdown if is_markdown else self._text).chunks(text)

    def stop(self) -> None:
        """End the split: it counts all the time."""
        self._counter.stop()


class FileChunker:
    """Counts by the model's `tokenizer.json`; raises `SourceError` if the file is none."""

    def __init__(self, tokenizer: Path, tokens: int = 512, overlap: int = 64) -> None:
        self._stopped = False
        arguments = (_whole(tokenizer), tokens - SPECIAL_TOKENS, overlap)
        try:
            self._text = TextSplitter.from_huggingface_tokenizer_str(*arguments)
            self._markdown = MarkdownSplitter.from_huggingface_tokenizer_str(*arguments)
        except Exception as error:
            # The library raises nothing narrower.
            raise SourceError(f"{tokenizer} is no tokenizer.json: {error}") from error

    def prepare(self, texts: Iterable[str]) -> None:
        """There is nothing to ask for."""

    def split(self, text: str, *, is_markdown: bool = False) -> list[str]:
        """Its chunks, in order, without white space around them."""
        if self._stopped:
            raise StoppedError
        return (self._markdown if is_markdown else self._text).chunks(text)

    def stop(self) -> None:
        """Split no further text: the library calls nobody while it splits one."""
        self._stopped = True


def _whole(tokenizer: Path) -> str:
    """The tokenizer without the limit that its file may set, beyond which no token is counted."""
    try:
        told = json.loads(tokenizer.read_bytes())
        return json.dumps(told | {"truncation": None, "padding": None})
    except (OSError, ValueError, TypeError) as error:
        raise SourceError(f"{tokenizer} cannot be read: {error}") from error


Chunker = ServiceChunker | FileChunker
