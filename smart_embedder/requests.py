"""The records that carry a request from stage to stage."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal

import numpy as np

from smart_embedder.errors import InvalidRequestError
from smart_embedder.vectors import MuveraSide, OutputDtype

Side = Literal["left", "right"]
InputType = Literal["query", "document"]

# What an answer may hold, beside so much for each byte of its request's body. The texts themselves
# and what reading them takes may hold as much again.
ANSWER_BYTES = 36 << 20
BYTES_PER_BODY_BYTE = 10


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

    def reserve(self, size: int, what: str, advice: str) -> None:
        """Hold `size` bytes until the answer is read.

        Raises as `check`, and `QueueFullError` where other answers leave no room at present.
        """
        self.check(size, what, advice)
        self._size = max(self._size, size)

    def reserve_more(self, size: int, what: str, advice: str) -> None:
        """Hold `size` bytes beside those that were needed before; raises as `need`."""
        self.reserve(self._size + size, what, advice)


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


class Purpose(Enum):
    """Which metrics count a request and its forwards."""

    EMBEDDING = auto()
    RERANKING = auto()
    TOKENIZING = auto()


def check_rendering(request: EmbedRequest) -> None:
    """Raise `InvalidRequestError` where what is made of the vectors has no effect.

    This needs no model, so it is known before one is waited for.
    """
    if request.output_dtype != "float32" and not (request.outputs.dense or request.outputs.colbert):
        raise InvalidRequestError(
            "the option output_dtype has no effect without dense and ColBERT vectors: leave it "
            "out, or ask for one of them"
        )
    if request.colbert_pool_factor is None:
        return
    if not request.outputs.colbert:
        raise InvalidRequestError(
            "the option colbert_pool_factor has no effect without ColBERT vectors: leave it "
            "out, or set return_colbert to true"
        )
    if "query" in {request.input_type, request.muvera}:
        raise InvalidRequestError(
            "the option colbert_pool_factor is for documents, and these are queries, which "
            "need all of their vectors: leave it out"
        )
    if request.return_tokens:
        raise InvalidRequestError(
            "the options return_tokens and colbert_pool_factor exclude each other, because no "
            "single token stands behind a pooled vector: send one"
        )
