"""Split texts into chunks of limited tokens, at headings, paragraphs and sentences if possible."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.ingest.pace import batches

CountTokens = Callable[[Sequence[str]], Sequence[int]]

_TEXTS_PER_REQUEST, _CHARACTERS_PER_REQUEST = 128, 500_000
_MAX_WORD = 10_000
# About 5 MB. A text full of numbers has an unlimited number of different words.
_CACHED_WORDS, _CACHED_CHARACTERS = 30_000, 1_000_000
# The models add a token at the beginning and at the end of a text.
SPECIAL_TOKENS = 2


class StoppedError(Exception):
    """The run has ended while a thread counted or split."""


class ServiceChunker:
    """Splits texts, and counts tokens with the service: `count` is `Client.count_tokens`.

    A chunk has at most `tokens`, including special ones, and repeats `overlap` of the one before.
    The tokens of a text are the sum of those of its words, each of which is counted only once: the
    tokenizers of bge-m3 and BERT never join words at white space.
    """

    def __init__(self, count: CountTokens, tokens: int = 512, overlap: int = 64) -> None:
        self._count = count
        self._known: dict[str, int] = {}
        self._characters = 0
        self._stopped = False
        arguments = (self.count_tokens, tokens - SPECIAL_TOKENS, overlap)
        self._text = TextSplitter.from_callback(*arguments)
        self._markdown = MarkdownSplitter.from_callback(*arguments)

    def prepare(self, texts: Iterable[str]) -> None:
        """Count the words of many texts, in few requests."""
        if len(self._known) > _CACHED_WORDS or self._characters > _CACHED_CHARACTERS:
            self._known.clear()
            self._characters = 0
        self._count_words(word for text in texts for word in _split_words(text))

    def split(self, text: str, *, is_markdown: bool = False) -> list[str]:
        """Return the chunks in order, without white space around them."""
        return (self._markdown if is_markdown else self._text).chunks(text)

    def stop(self) -> None:
        """Raise `StoppedError` in a thread that splits."""
        self._stopped = True

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text, without special ones."""
        if self._stopped:
            raise StoppedError
        words = _split_words(text)
        self._count_words(words)
        return sum(self._known[word] for word in words)

    def _count_words(self, words: Iterable[str]) -> None:
        unknown = [word for word in dict.fromkeys(words) if word not in self._known]
        for request in batches(unknown, len, lambda: _CHARACTERS_PER_REQUEST, _TEXTS_PER_REQUEST):
            if self._stopped:
                raise StoppedError
            self._known.update(zip(request, self._count(request), strict=True))
            self._characters += sum(map(len, request))


def _split_words(text: str) -> list[str]:
    """Split at white space; cut text without spaces, far above the length of a word."""
    return [
        word[start : start + _MAX_WORD]
        for word in text.split()
        for start in range(0, len(word), _MAX_WORD)
    ]


class FileChunker:
    """Splits texts, and counts tokens with the model's `tokenizer.json`.

    Raises `IngestError` if the file is no such file.
    """

    def __init__(self, tokenizer: Path, tokens: int = 512, overlap: int = 64) -> None:
        self._stopped = False
        arguments = (_read_tokenizer(tokenizer), tokens - SPECIAL_TOKENS, overlap)
        try:
            self._text = TextSplitter.from_huggingface_tokenizer_str(*arguments)
            self._markdown = MarkdownSplitter.from_huggingface_tokenizer_str(*arguments)
        except Exception as error:
            # The library raises plain exceptions.
            raise IngestError(f"{tokenizer} is no tokenizer.json: {error}") from error

    def prepare(self, texts: Iterable[str]) -> None:
        """Do nothing: no service is asked."""

    def split(self, text: str, *, is_markdown: bool = False) -> list[str]:
        """Return the chunks in order, without white space around them."""
        if self._stopped:
            raise StoppedError
        return (self._markdown if is_markdown else self._text).chunks(text)

    def stop(self) -> None:
        """Split no further text: a split that runs cannot be stopped."""
        self._stopped = True


def _read_tokenizer(path: Path) -> str:
    """Read a tokenizer, and remove truncation: tokens beyond it would not be counted."""
    try:
        tokenizer = json.loads(path.read_bytes())
        return json.dumps(tokenizer | {"truncation": None, "padding": None})
    except (OSError, ValueError, TypeError) as error:
        raise IngestError(f"{path} cannot be read: {error}") from error


Chunker = ServiceChunker | FileChunker
