"""What a run is asked to do, and what it did."""

from dataclasses import dataclass, field
from pathlib import Path

from smart_embedder_client.ingest.sources import Fields
from smart_embedder_client.qdrant.store import KINDS, Datatype


class IngestError(Exception):
    """The run cannot begin or go on; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How vectors are made and stored, as `smart-embedder ingest --help` tells it.

    `datatype` None is that of the collection, float32 for a new one. `patience` is in seconds.
    """

    kinds: frozenset[str] = frozenset(KINDS)
    datatype: Datatype | None = None
    colbert_pool_factor: int | None = None
    requests: int = 4
    streams: int = 4
    batch_bytes: int = 16 * 2**20
    patience: float = 300.0
    index: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestOptions(LoadOptions):
    """One run.

    `chunk_tokens` counts special tokens, too. `split_for_colbert` makes chunks so short that their
    ColBERT vectors need no pooling.
    """

    source: Path
    dataset: str
    fields: Fields = field(default_factory=Fields)
    chunk_tokens: int = 512
    overlap: int = 64
    tokenizer: Path | None = None
    split_for_colbert: bool = False
    sync: bool = False
    recheck: bool = False


@dataclass(slots=True, kw_only=True)
class Report:
    """What a run did.

    Attributes:
        points: How many its sources have.
        uploaded: How many of them were stored by this run.
        pooled: Chunks whose ColBERT vectors were too many for a point.
        truncated: Chunks that were longer than the model reads.
        refused: What is not in the collection, and why.
        seconds: How long it took.
        documents: How many were read, of a collection its points; those that are stored already
            count.
        repeated: Documents that say the same as another one of the same source.
        removed: Points of sources that are gone or have changed.
        stale: The same, where they were left alone.
        failed: Files and folders that could not be read, or not to their end, and why.
        unread: How many files were left out, by their ending or another reason.
    """

    points: int = 0
    uploaded: int = 0
    pooled: int = 0
    truncated: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    documents: int = 0
    repeated: int = 0
    removed: int = 0
    stale: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    unread: dict[str, int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether something was read, and all of it is stored."""
        return self.documents > 0 and not self.refused and not self.failed
