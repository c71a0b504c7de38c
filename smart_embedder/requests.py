"""The records that carry a request from stage to stage."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from smart_embedder.errors import InvalidRequestError
from smart_embedder.vectors import MuveraSide, OutputDtype

Side = Literal["left", "right"]
InputType = Literal["query", "document"]
FloatArray = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]

# What an answer may hold, beside so much for each byte of its request's body. The texts themselves
# and what reading them takes may hold as much again.
ANSWER_BYTES = 36 << 20
BYTES_PER_BODY_BYTE = 10


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a request, from `began` to `ended` by `time.perf_counter`.

    `name` is `tokenize`, `queue`, `forward` or `render`, and `model` the model it was for. A
    `forward` lasts from the first batch that held a part of the request to the last; of that the
    device worked for `device_seconds`.
    """

    name: str
    began: float
    ended: float
    model: str | None = None
    device_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a request spent in each stage; `queue` is all waiting outside a forward."""

    tokenize: float
    queue: float
    inference: float
    total: float
    stages: tuple[Stage, ...] = ()


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
class Outputs:
    """The kinds of vectors that are wanted of a model; a reranker makes none."""

    dense: bool = False
    sparse: bool = False
    colbert: bool = False

    @classmethod
    def of(cls, kinds: Iterable[str]) -> "Outputs":
        """The outputs of these names."""
        return cls(**dict.fromkeys(kinds, True))

    def __bool__(self) -> bool:
        return self.dense or self.sparse or self.colbert


DENSE = Outputs(dense=True)


class AnswerMemory:
    """Refuses an answer of more than `allowed` bytes; by default there is no limit.

    `size` is always that of the whole answer, as far as it is known: of token ids, of vectors, of
    what else is kept until the client has read it. What a forward needs on its device meanwhile is
    limited by the token budget. `body_bytes` are those of the body, unpacked, that have arrived.
    """

    def __init__(self, allowed: int = sys.maxsize) -> None:
        self._allowed = allowed
        self._size = 0
        self.body_bytes = 0

    @property
    def allowed(self) -> int:
        """The most bytes that the answer may hold."""
        return self._allowed

    @property
    def held(self) -> int:
        """How many bytes are held until the answer is read, the texts of the body included."""
        return self._size + self.body_bytes

    def check(self, size: int, what: str, advice: str) -> None:
        """Raise `InvalidRequestError` if `what` is too large; safe to call from any thread."""
        if size > self.allowed:
            raise InvalidRequestError(
                f"{what} need {size} bytes, and this answer may hold {self.allowed} "
                f"({ANSWER_BYTES}, and {BYTES_PER_BODY_BYTE} for each byte of the body, as far as "
                f"the memory has room): {advice}"
            )

    def need(self, size: int, what: str, advice: str) -> None:
        """Hold `size` bytes until the answer is read.

        Raises as `check`, and `QueueFullError` where other answers leave no room at present.
        """
        self.check(size, what, advice)
        self._size = max(self._size, size)

    def need_more(self, size: int, what: str, advice: str) -> None:
        """Hold `size` bytes beside those that were needed before; raises as `need`."""
        self.need(self._size + size, what, advice)


UNLIMITED = AnswerMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True)
class EmbedRequest(EmbeddingOptions):
    """Texts, what is wanted of them, and for whom.

    - `outputs` are the kinds of vectors in the answer.
    - What becomes of vectors when the answer is rendered: `output_dtype` is the number format of
      dense and ColBERT vectors, `colbert_pool_factor` reduces the number of ColBERT vectors by
      about that factor, and `muvera` adds one vector that represents all ColBERT vectors of a text
      before pooling and quantization.
    - While interactive requests wait, those that are `is_bulk` get a fifth of the device. `client`
      names whom the request is for: places in the queue and the device are shared fairly between
      clients. `model` is as in `EngineCore.lease`. `answer` is asked for room as soon as
      it is known what the vectors will hold.
    """

    texts: list[str]
    outputs: Outputs = DENSE
    normalize_dense: bool = False
    output_dtype: OutputDtype = "float32"
    colbert_pool_factor: int | None = None
    muvera: MuveraSide | None = None
    is_bulk: bool = False
    client: str = ""
    model: str | None = None
    answer: AnswerMemory = UNLIMITED

    @property
    def needed(self) -> Outputs:
        """The kinds of vectors that must be computed."""
        return replace(self.outputs, colbert=True) if self.muvera else self.outputs


@dataclass(frozen=True, slots=True)
class FusionWeights:
    """How much each score counts; equal by default, as in FlagEmbedding."""

    dense: float = 1.0
    sparse: float = 1.0
    colbert: float = 1.0

    def __post_init__(self) -> None:
        weights = self.dense, self.sparse, self.colbert
        if not all(np.isfinite(weights)) or min(weights) < 0 or not any(weights):
            raise InvalidRequestError("weights must be at least 0, and one of them above 0")


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """A query and the passages to score for it.

    `normalize` turns logits into probabilities. `instruction` is for rerankers that read one, and
    `weights` for late interaction. `truncation` applies to passages. `is_bulk`, `client`, `model`
    and `answer` are as in `EmbedRequest`.
    """

    query: str
    passages: list[str]
    normalize: bool = False
    instruction: str | None = None
    weights: FusionWeights = field(default_factory=FusionWeights)
    truncation: TruncationOptions = CUT_AT_END
    is_bulk: bool = False
    client: str = ""
    model: str | None = None
    answer: AnswerMemory = UNLIMITED

    @property
    def texts(self) -> list[str]:
        """The query, and every passage."""
        return [self.query, *self.passages]


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

    All are float32: `dense` is `[width]`, `colbert` `[tokens - 1, colbert width]`.
    """

    dense: FloatArray | None = None
    sparse: SparseVector | None = None
    colbert: FloatArray | None = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays that it holds, or None, in the order in which `in_own_memory` takes them."""
        sparse = self.sparse
        return (self.dense, sparse and sparse.indices, sparse and sparse.values, self.colbert)

    @property
    def nbytes(self) -> int:
        """Their size in bytes."""
        return sum([each.nbytes for each in self.arrays if each is not None])


def in_own_memory(results: Sequence[TextEmbedding]) -> list[TextEmbedding]:
    """The same in memory of their own, and no views of the results of a whole batch.

    It is one block for each kind: many small ones would be new pages for the system each time.
    """
    blocks = map(_in_one_block, zip(*(each.arrays for each in results), strict=True))
    return [
        TextEmbedding(dense, before.sparse and SparseVector(indices, weights), colbert)
        for before, dense, indices, weights, colbert in zip(results, *blocks, strict=True)
    ]


def _in_one_block(arrays: Sequence[Any]) -> list[Any]:
    """Copies that are neighbours in memory; None where there is none."""
    present = [each for each in arrays if each is not None]
    if not present:
        return [None] * len(arrays)
    block, copies, start = np.concatenate(present), list[Any](), 0
    for each in arrays:
        copies.append(None if each is None else block[start : start + len(each)])
        start += 0 if each is None else len(each)
    return copies


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

    `field` is `sentences`, `query` or `passages`; `index` is the place in a list, 0 for a query.
    The text was cut from `side`. Where not `exact`, `original_tokens` is a lower bound.
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
    """What `EngineCore.embed` returns: one `TextEmbedding` for each text, in the order given.

    `token_strings` has one entry for each text where `return_tokens` is set. `replaced` are JSON
    pointers to the strings of the request whose lone surrogates were read as U+FFFD.
    """

    embeddings: list[TextEmbedding]
    truncations: list[Truncation]
    tokens: int
    timings: Timings
    token_strings: list[TokenStrings] | None = None
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PartScores:
    """The scores of one passage for one query; None for a kind that is not made."""

    dense: float | None
    sparse: float | None
    colbert: float | None


@dataclass(frozen=True, slots=True)
class RerankResult:
    """What `EngineCore.rerank` returns: one score for each passage, in the order given.

    `parts` holds the scores behind each one where the embedding model itself was the reranker.
    `replaced` is as in `EmbeddingResult`.
    """

    scores: list[float]
    parts: list[PartScores] | None
    truncations: list[Truncation]
    tokens: int
    timings: Timings
    replaced: tuple[str, ...] = ()
