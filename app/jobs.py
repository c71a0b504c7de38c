"""The records that carry a request from stage to stage, and what a model must offer them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from app.timings import Timings

FloatArray = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Which kinds of vectors are wanted."""

    dense: bool = False
    sparse: bool = False
    colbert: bool = False

    def __or__(self, other: "Outputs") -> "Outputs":
        return Outputs(
            self.dense or other.dense, self.sparse or other.sparse, self.colbert or other.colbert
        )

    def __bool__(self) -> bool:
        return self.dense or self.sparse or self.colbert


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text as the model reads it: `ids` with special tokens, cut to the model's limit."""

    ids: TokenIds
    original_tokens: int

    @property
    def truncated(self) -> bool:
        """Whether tokens were cut off."""
        return self.original_tokens > len(self.ids)


@dataclass(frozen=True, slots=True)
class SparseVector:
    """Lexical weights: `values[i]` float32 > 0 for the token id `indices[i]`, ids ascending."""

    indices: npt.NDArray[np.int64]
    values: FloatArray


@dataclass(frozen=True, slots=True)
class TextEmbedding:
    """The vectors of one text; a kind not asked for is None.

    `dense` is `[width]` and `colbert` `[tokens - 1, colbert width]`, both float32.
    """

    dense: FloatArray | None = None
    sparse: SparseVector | None = None
    colbert: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class TokenizedPair:
    """A query and a passage as a reranker reads them together, and how much of each it reads."""

    ids: TokenIds
    query_tokens: int
    query_kept: int
    passage_tokens: int
    passage_kept: int


@dataclass(frozen=True, slots=True)
class Truncation:
    """A text of the request had `original_tokens`; `model` read only the first `max_tokens`.

    `field` is `sentences`, `query` or `passages`; `index` is the place in a list, 0 for a query.
    """

    field: str
    index: int
    model: str
    max_tokens: int
    original_tokens: int

    @property
    def truncated_tokens(self) -> int:
        """How many tokens the model did not read."""
        return self.original_tokens - self.max_tokens


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """What `Engine.embed` returns: one `TextEmbedding` for each text, in the order given."""

    embeddings: list[TextEmbedding]
    truncations: list[Truncation]
    tokens: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class PartScores:
    """bge-m3's three scores of one passage for one query."""

    dense: float
    sparse: float
    colbert: float


@dataclass(frozen=True, slots=True)
class RerankResult:
    """What `Engine.rerank` returns: one score for each passage, in the order given.

    `parts` holds the three scores behind each one where bge-m3 itself was the reranker.
    """

    scores: list[float]
    parts: list[PartScores] | None
    truncations: list[Truncation]
    tokens: int
    timings: Timings


class Model(Protocol):
    """A loaded model as the device thread sees it."""

    @property
    def name(self) -> str:
        """The name that answers carry."""

    @property
    def max_length(self) -> int:
        """The most tokens of one sequence, special tokens included."""

    @property
    def max_batch_sequences(self) -> int | None:
        """The most sequences in one forward, where there is such a limit."""

    def launch(self, sequences: list[TokenIds], outputs: Outputs) -> Callable[[], Sequence[Any]]:
        """Begin one batch, in the device thread.

        What is returned waits for it, in any thread, and gives a result for each sequence, in
        order.
        """

    def settle(self) -> None:
        """Finish of the loading what need not be done before the first forward, beside others."""


class Embedder(Model, Protocol):
    """A model whose results are `TextEmbedding`s with at least the kinds asked for."""

    @property
    def colbert_width(self) -> int:
        """Numbers in each ColBERT vector; 0 where it makes none."""

    def tokenize(self, texts: list[str]) -> list[TokenizedText]:
        """Token ids of each text; safe to call from several threads."""


class Reranker(Model, Protocol):
    """A model whose results are scores."""

    @property
    def scores_are_logits(self) -> bool:
        """Whether a sigmoid makes probabilities of the scores."""

    def tokenize_pairs(
        self, query: str, passages: list[str], instruction: str | None
    ) -> list[TokenizedPair]:
        """Token ids of the query with each passage; safe to call from several threads."""


@dataclass(slots=True, eq=False)
class Job:
    """The work of one request for one model.

    `reduce` is applied to each result off the event loop, so that what is large need not be kept.

    Its sequences go to the device in order, over one or more batches. `taken` counts those handed
    to the device, `finished` those that came back; `departed` is set once it has left the queue.
    `virtual_start` places it among its rivals, and `weight` is its share of the device beside
    theirs: see `app.engine.batcher`. `time_limit` is the most seconds that its forwards may take
    together; without one, each forward is limited by itself.
    """

    model: Model
    sequences: list[TokenIds]
    outputs: Outputs
    future: "asyncio.Future[list[Any]]"
    enqueued_at: float
    reduce: Callable[[Any], Any] | None = None
    time_limit: float | None = None
    weight: float = 1.0
    virtual_start: float = 0.0
    departed: asyncio.Event = field(default_factory=asyncio.Event)
    taken: int = 0
    finished: int = 0
    first_taken_at: float | None = None
    last_back_at: float | None = None
    inference_seconds: float = 0.0
    results: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.results = [None] * len(self.sequences)

    @property
    def waiting(self) -> bool:
        """Whether it has sequences that still wait for the device."""
        return self.taken < len(self.sequences)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a batch that belongs to one job: its sequences `start` to `stop`."""

    job: Job
    start: int
    stop: int

    @property
    def sequences(self) -> list[TokenIds]:
        """The token ids of this part."""
        return self.job.sequences[self.start : self.stop]

    @property
    def tokens(self) -> int:
        """Tokens of this part."""
        return sum(map(len, self.sequences))

    def split(self, count: int) -> "tuple[Share, Share]":
        """Its first `count` sequences, and the rest."""
        middle = self.start + count
        return Share(self.job, self.start, middle), Share(self.job, middle, self.stop)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward runs: parts of one or more jobs for the same model."""

    model: Model
    shares: list[Share]

    def launch(self, model: Model) -> Callable[[], list[Any]]:
        """Begin the forward, in the device thread; what is returned waits for its results.

        `model` is the batch's own, or its stand-in on another device.
        """
        collect = model.launch(self.sequences, self.outputs)
        return lambda: self._reduce(collect())

    def _reduce(self, results: Sequence[Any]) -> list[Any]:
        reduced: list[Any] = []
        begin = 0
        for share in self.shares:
            part = results[begin : begin + share.stop - share.start]
            reduced.extend(part if share.job.reduce is None else map(share.job.reduce, part))
            begin += len(part)
        return reduced

    def without_departed(self) -> "Batch":
        """The shares whose caller still waits."""
        return Batch(self.model, [share for share in self.shares if not share.job.future.done()])

    def halves(self) -> "tuple[Batch, Batch]":
        """Its first half, by sequences, and the rest; the first is empty for a single sequence."""
        left = len(self.sequences) // 2
        first: list[Share] = []
        second: list[Share] = []
        for share in self.shares:
            count = min(left, share.stop - share.start)
            left -= count
            for part, shares in zip(share.split(count), (first, second), strict=True):
                if part.start < part.stop:
                    shares.append(part)
        return Batch(self.model, first), Batch(self.model, second)

    @property
    def sequences(self) -> list[TokenIds]:
        """The token ids of every sequence, share after share."""
        return [ids for share in self.shares for ids in share.sequences]

    @property
    def outputs(self) -> Outputs:
        """The union of what the jobs want."""
        union = Outputs()
        for share in self.shares:
            union |= share.job.outputs
        return union

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum(share.tokens for share in self.shares)
