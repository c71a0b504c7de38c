"""What is ingested, and the errors of reading it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class SourceError(Exception):
    """A source cannot be read; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Which fields of a row are read: `text`, and `id` if the rows have one."""

    text: str = "text"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """One text before it is split.

    Attributes:
        source: Its file, as a path below the folder that is ingested.
        key: Tells the rows of a file apart: the value of the id field, else a digest of the text.
        text: What is embedded.
        metadata: The other fields of its row.
        size: How many bytes of the input it takes, for the progress bar.
        is_markdown: Whether it is split by its headings.
        is_part: Whether it goes on where the document before it ends, in a longer text.
    """

    source: str
    key: str
    text: str
    metadata: Mapping[str, Any]
    size: int
    is_markdown: bool = False
    is_part: bool = False
