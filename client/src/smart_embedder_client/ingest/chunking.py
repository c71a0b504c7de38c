"""Texts into chunks of so many tokens, at headings, paragraphs and sentences where it can be."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from smart_embedder_client.ingest.documents import SourceError
from smart_embedder_client.ingest.tokens import CountTokens, StoppedError, TokenCounter

# The beginning and the end that the models add to a text.
SPECIAL_TOKENS = 2


class Chunker(Protocol):
    """Splits texts."""

    def prepare(self, texts: Iterable[str]) -> None:
        """Learn what is needed for all of them at once, where that is quicker."""

    def split(self, text: str, *, is_markdown: bool = False) -> list[str]:
        """Its chunks, in order, without white space around them."""

    def stop(self) -> None:
        """Have what splits in another thread raise StoppedError as soon as it can."""


class ServiceChunker:
    """Counts tokens by asking the service, for each word once.

    Args:
        count: Asks for the number of tokens of each text: `Client.count_tokens`.
        tokens: The most of a chunk, special ones included.
        overlap: The most that a chunk repeats of the one before it.
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
    """Counts tokens by the model's own `tokenizer.json`, as `ServiceChunker` does.

    Raises:
        SourceError: The file is no tokenizer.
    """

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
