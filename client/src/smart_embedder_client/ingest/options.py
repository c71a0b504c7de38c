"""The options and the report of a run."""

from dataclasses import dataclass, field
from pathlib import Path

from smart_embedder_client.ingest.sources import Fields
from smart_embedder_client.qdrant.store import KINDS, Datatype


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How vectors are made and stored; `smart-embedder ingest --help` describes each option.

    `datatype` None means that of the collection, or float32 for a new one. `patience` is in
    seconds.
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
    """The options of a run that reads files.

    `chunk_tokens` includes special tokens.
    """

    source: Path
    dataset: str
    fields: Fields = field(default_factory=Fields)
    chunk_tokens: int = 512
    overlap: int = 64
    tokenizer: Path | None = None
    sync: bool = False
    recheck: bool = False


@dataclass(slots=True, kw_only=True)
class Report:
    """The result of a run.

    Attributes:
        points: The number of points of the sources.
        uploaded: The number of points that this run stored.
        pooled: The number of chunks whose ColBERT vectors were pooled to fit into a point.
        truncated: The number of chunks that the model truncated.
        refused: The sources of chunks that were not stored, with reasons.
        seconds: The duration.
        documents: The number of documents that were read, including those stored before. For a
            collection it is the number of points.
        repeated: The number of documents that repeat another one of the same source.
        removed: The number of removed points, whose sources are gone or have changed.
        stale: The number of such points that were not removed.
        failed: Files and folders that could not be read, or not to their end, with reasons.
        unread: The number of files that were left out, by suffix or reason.
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
        """Whether documents were read and all of them are stored."""
        return self.documents > 0 and not self.refused and not self.failed
