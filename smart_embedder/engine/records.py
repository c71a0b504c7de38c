"""The records that carry a request from stage to stage."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from smart_embedder.observability.tracing import Timings

Side = Literal["left", "right"]
InputType = Literal["query", "document"]


@dataclass(frozen=True, slots=True)
class TruncationOptions:
    """How a text with more tokens than its model reads is truncated.

    Tokens are cut from `side`, where `left` is the beginning; special tokens and a prompt are kept.
    Without `truncate` the request is refused with a `TextTooLongError` instead. `max_tokens` lowers
    the limit of a text, not counting special tokens. In reranking, `side` and `max_tokens` apply to
    the passages; a query is always cut from the right.
    """

    truncate: bool = True
    side: Side = "right"
    max_tokens: int | None = None


CUT_AT_END = TruncationOptions()


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """How the texts of an embedding request are read, and what its result holds.

    - `truncation` applies to every model that reads the texts.
    - `prompt`, `prompt_name` and `input_type` choose the prompt that is read before each text; at
      most one of them may be set. `prompt` is the text itself, `prompt_name` its name in the
      model's sentence-transformers configuration, and `input_type` the type of the texts, for which
      that configuration may have a prompt; every model takes it. Only the model that makes dense
      vectors reads a prompt.
    - `preferred_prompts` are names of prompts that suit the texts better than that of their
      `input_type`; the first that the model has is read.
    - `dimensions` keeps the first so many numbers of a dense vector. They are scaled to unit length
      if the whole vector is.
    - `return_tokens` asks for `EmbeddingResult.token_strings`.
    """

    truncation: TruncationOptions = CUT_AT_END
    prompt: str | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    preferred_prompts: tuple[str, ...] = ()
    dimensions: int | None = None
    return_tokens: bool = False


NO_OPTIONS = EmbeddingOptions()


FloatArray = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs that are wanted of a model: kinds of vectors, or all logits of a classifier.

    `states` are the last hidden states of all tokens.
    """

    dense: bool = False
    sparse: bool = False
    colbert: bool = False
    states: bool = False
    logits: bool = False

    def __bool__(self) -> bool:
        return self.dense or self.sparse or self.colbert or self.states


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text as the model reads it: `ids` with special tokens, cut to the model's limit.

    `original_tokens` is its number of tokens uncut, or a lower bound where not `exact`.
    """

    ids: TokenIds
    original_tokens: int
    exact: bool = True

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

    All are float32: `dense` is `[width]`, `colbert` `[tokens - 1, colbert width]`, `states`
    `[tokens, width]`.
    """

    dense: FloatArray | None = None
    sparse: SparseVector | None = None
    colbert: FloatArray | None = None
    states: FloatArray | None = None

    @property
    def nbytes(self) -> int:
        """Their size in bytes."""
        sparse = self.sparse
        nbytes = 0 if sparse is None else sparse.indices.nbytes + sparse.values.nbytes
        vectors = (self.dense, self.colbert, self.states)
        return nbytes + sum(each.nbytes for each in vectors if each is not None)

    def copy(self) -> "TextEmbedding":
        """The same in memory of its own, and no view of the results of a whole batch."""
        dense, sparse, colbert, states = self.dense, self.sparse, self.colbert, self.states
        return TextEmbedding(
            None if dense is None else dense.copy(),
            None if sparse is None else SparseVector(sparse.indices.copy(), sparse.values.copy()),
            None if colbert is None else colbert.copy(),
            None if states is None else states.copy(),
        )


class JoinedIds:
    """Token ids in two parts, joined where a model reads them.

    The pairs of one query share the first part, which would be copied for each passage otherwise.
    """

    __slots__ = ("_first", "_length", "_second")

    def __init__(self, first: TokenIds, second: TokenIds) -> None:
        self._first = first
        self._second = second
        self._length = len(first) + len(second)

    def __len__(self) -> int:
        return self._length

    def join(self) -> TokenIds:
        """All of them, `[tokens]`."""
        return np.concatenate((self._first, self._second))


TokenSequence = TokenIds | JoinedIds


def join(sequence: TokenSequence) -> TokenIds:
    """The ids of a sequence as one array, `[tokens]`."""
    return sequence.join() if isinstance(sequence, JoinedIds) else sequence


@dataclass(frozen=True, slots=True)
class TokenizedPair:
    """A query and a passage as a reranker reads them together, and how much of each it reads.

    Where not `query_exact` or `passage_exact`, its number of tokens is a lower bound.
    """

    sequence: TokenSequence
    query_tokens: int
    query_kept: int
    passage_tokens: int
    passage_kept: int
    query_exact: bool = True
    passage_exact: bool = True

    @property
    def ids(self) -> TokenIds:
        """The ids of both with special tokens, joined anew each time."""
        return join(self.sequence)


@dataclass(frozen=True, slots=True)
class Truncation:
    """A text of the request had `original_tokens`; `model` read only `max_tokens` of them.

    `field` is `sentences`, `query`, `passages` or `inputs`; `index` is the place in a list, 0 for a
    query. The text was cut from `side`. Where not `exact`, `original_tokens` is a lower bound.
    """

    field: str
    index: int
    model: str
    max_tokens: int
    original_tokens: int
    side: Side = "right"
    exact: bool = True

    @property
    def pointer(self) -> str:
        """The place in the request, as a JSON pointer."""
        return "/query" if self.field == "query" else f"/{self.field}/{self.index}"

    @property
    def truncated_tokens(self) -> int:
        """How many tokens the model did not read."""
        return self.original_tokens - self.max_tokens


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """Tokens of a text without special ones: token `i` is `ids[i]`.

    It stands for the characters of the text from `starts[i]` to `stops[i]`. All are `[tokens]`
    int64.
    """

    ids: TokenIds
    starts: TokenIds
    stops: TokenIds


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that a model reads before or after every text."""

    id: int
    string: str


@dataclass(frozen=True, slots=True)
class TokenStrings:
    """The vocabulary's strings for the tokens behind vectors; None for a kind not asked for.

    `sparse[i]` belongs to the weight `values[i]`, `colbert[i]` to row `i`.
    """

    sparse: list[str] | None
    colbert: list[str] | None


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """What `Engine.embed` returns: one `TextEmbedding` for each text, in the order given.

    `token_strings` has one entry for each text where `EmbeddingOptions.return_tokens` is set.
    """

    embeddings: list[TextEmbedding]
    truncations: list[Truncation]
    tokens: int
    timings: Timings
    token_strings: list[TokenStrings] | None = None


@dataclass(frozen=True, slots=True)
class PartScores:
    """The scores of one passage for one query; None for a kind that is not made."""

    dense: float | None
    sparse: float | None
    colbert: float | None


@dataclass(frozen=True, slots=True)
class RerankResult:
    """What `Engine.rerank` returns: one score for each passage, in the order given.

    `parts` holds the scores behind each one where the embedding model itself was the reranker.
    """

    scores: list[float]
    parts: list[PartScores] | None
    truncations: list[Truncation]
    tokens: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class ClassificationResult:
    """What `Engine.classify` returns: `logits` `[labels]` of each input, in the order given."""

    labels: tuple[str, ...]
    logits: list[FloatArray]
    truncations: list[Truncation]
    tokens: int
    timings: Timings
