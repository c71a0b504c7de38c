"""Requests to the engine, and their options."""

import sys
from binascii import a2b_base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from string import whitespace
from typing import Any, Literal

import numpy as np

from smart_embedder.errors import InvalidRequestError
from smart_embedder.vectors import MuveraSide, OutputDtype

Charge = Callable[[int], None]
Side = Literal["left", "right"]
InputType = Literal["query", "document"]
Aggregation = Literal["none", "simple", "first", "average", "max"]

# The maximum size of a response: a base, and an amount for each byte of the request's body. The
# texts, and the work of reading them, may use as much again.
ANSWER_BYTES = 36 << 20
BYTES_PER_BODY_BYTE = 10
# The pixels of a picture, while it is decoded, and those of the pictures before it.
IMAGE_BYTES = 44 << 20
IMAGE_BYTES_PER_BODY_BYTE = 16


@dataclass(frozen=True, slots=True)
class TruncationOptions:
    """How texts with more tokens than the model's limit are truncated.

    Tokens are cut from `side`, where `left` is the beginning. Special tokens are kept, and so is
    the prompt unless it is longer than the limit. Without `truncate`, the request is refused with a
    `TextTooLongError` instead. `max_tokens` lowers the limit, without special tokens. In reranking,
    `side` and `max_tokens` apply to the passages, and a query is always cut from the right.
    """

    truncate: bool = True
    side: Side = "right"
    max_tokens: int | None = None

    def lower(self, limit: int) -> int:
        """Return the limit of tokens, or `max_tokens` if that is lower."""
        return limit if self.max_tokens is None else min(limit, self.max_tokens)


CUT_AT_END = TruncationOptions()


@dataclass(frozen=True, slots=True)
class Outputs:
    """The kinds of vectors that a model computes for a text; none for a reranker."""

    dense: bool = False
    sparse: bool = False
    colbert: bool = False

    @classmethod
    def of(cls, kinds: Iterable[str]) -> "Outputs":
        """Return the outputs with these names."""
        return cls(**dict.fromkeys(kinds, True))

    def __bool__(self) -> bool:
        return self.dense or self.sparse or self.colbert


DENSE = Outputs(dense=True)


class AnswerMemory:
    """The memory reserved for a response of at most `allowed` bytes; unlimited by default.

    A `size` is always that of the whole response, as far as it is known: token ids, vectors, and
    everything else that is kept until the client has read it. It does not include the memory of a
    forward on its device, which the token budget limits. `body_bytes` is the number of bytes of the
    body that have arrived.
    """

    def __init__(self, allowed: int = sys.maxsize) -> None:
        self._allowed = allowed
        self._size = 0
        self.body_bytes = 0

    @property
    def allowed(self) -> int:
        """The maximum size of the response in bytes."""
        return self._allowed

    @property
    def allowed_for_images(self) -> int:
        """The maximum size of decoded pictures in bytes, which are held until the forward."""
        return self._allowed

    @property
    def held(self) -> int:
        """The bytes that are reserved until the response is read, including those of the body."""
        return self._size + self.body_bytes

    def add_body(self, size: int) -> None:
        """Count `size` more bytes of the body; raises an error if there is no room for them."""
        self.body_bytes += size

    def check(self, size: int, what: str, advice: str) -> None:
        """Raise `InvalidRequestError` if `what`, such as "these 7 tokens", is too large.

        Safe to call from any thread.
        """
        if size > self.allowed:
            raise InvalidRequestError(
                f"{what} need {size} bytes, and this answer may hold {self.allowed} "
                f"({ANSWER_BYTES}, and {BYTES_PER_BODY_BYTE} for each byte of the body, as far as "
                f"the memory has room): {advice}"
            )

    def check_image(self, size: int, what: str) -> None:
        """Raise `InvalidRequestError` if a picture and those before it need too many bytes.

        Safe to call from any thread.
        """
        if size > self.allowed_for_images:
            raise InvalidRequestError(
                f"{what} need {size} bytes, and the pictures of this request may use "
                f"{self.allowed_for_images} ({IMAGE_BYTES}, and {IMAGE_BYTES_PER_BODY_BYTE} for "
                "each byte of the body, as far as the memory has room): send fewer pictures, or "
                "smaller ones"
            )

    def reserve(self, size: int, what: str, advice: str) -> None:
        """Reserve `size` bytes until the response is read.

        Raises the error of `check`, and `QueueFullError` if other requests leave too little memory.
        """
        self.check(size, what, advice)
        self._size = max(self._size, size)

    def reserve_more(self, size: int, what: str, advice: str) -> None:
        """Reserve `size` more bytes; raises the errors of `reserve`."""
        self.reserve(self._size + size, what, advice)


UNLIMITED = AnswerMemory()


@dataclass(frozen=True, slots=True)
class ImageInput:
    """A picture among the texts of a request: a PNG, JPEG, WebP or GIF file.

    `content` is the file, or a string of its base64, alone or behind the comma of a data URL.

    `memory` limits the bytes of its pixels.
    """

    content: bytes | str
    memory: AnswerMemory = field(default=UNLIMITED, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.content)

    def read(self) -> bytes:
        """Return the file; raises `InvalidRequestError` if it is no base64."""
        if isinstance(self.content, bytes):
            return self.content
        try:
            encoded = self.content[self.content.find(",") + 1 :].encode()
            return a2b_base64(encoded.translate(None, whitespace.encode()), strict_mode=True)
        except ValueError as error:
            raise InvalidRequestError(f"the picture is not valid base64: {error}") from None


def with_memory(texts: list[Any], memory: AnswerMemory) -> list[Any]:
    """Return the texts and pictures, with `memory` as the limit of the pictures."""
    if ImageInput not in set(map(type, texts)):
        return texts
    return [text if isinstance(text, str) else replace(text, memory=memory) for text in texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOptions:
    """Options of an embedding request.

    - `truncation` applies to every model that reads the texts.
    - `prompt`, `prompt_name` and `input_type` select the prompt that is read before each text. At
      most one of them may be set: `prompt` is the prompt itself, `prompt_name` its name in the
      model's sentence-transformers configuration, and `input_type` the type of the texts, for which
      the configuration may have a prompt. Every model accepts an `input_type`. Only the model of
      the dense vectors reads the prompt.
    - `preferred_prompts` are names of prompts that take precedence over that of `input_type`. The
      first that the model has is read.
    - `dimensions` keeps the first dimensions of a dense vector. If the whole vector has unit
      length, the shortened one is scaled to unit length too.
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


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Options of every request, which say whose it is and what it may use.

    - While interactive requests wait, requests with `is_bulk` get a fifth of the device.
    - `client` names the client: queue and devices are shared between clients by their weights.
    - `charge`, if set, is called with the number of tokens before they are queued; an error that it
      raises refuses the request.
    - `model` is as in `EngineCore.lease`.
    - `answer` reserves memory for the results before the forward.
    """

    is_bulk: bool = False
    client: str = ""
    client_weight: int = 1
    charge: Charge | None = None
    model: str | None = None
    answer: AnswerMemory = UNLIMITED


@dataclass(frozen=True)
class EmbedRequest(EmbeddingOptions, ClientOptions):
    """A request to embed texts and, with models that read them, pictures.

    - `outputs` are the kinds of vectors in the response.
    - `output_dtype`, `colbert_pool_factor` and `muvera` apply when the response is rendered:
      `output_dtype` is the number format of dense and ColBERT vectors, `colbert_pool_factor`
      reduces the number of ColBERT vectors by about that factor, and `muvera` adds one vector that
      represents all ColBERT vectors of a text before pooling and quantization.
    """

    texts: list[str] | list[str | ImageInput]
    outputs: Outputs = DENSE
    normalize_dense: bool = False
    output_dtype: OutputDtype = "float32"
    colbert_pool_factor: int | None = None
    muvera: MuveraSide | None = None

    @property
    def needed(self) -> Outputs:
        """The kinds of vectors that must be computed."""
        return replace(self.outputs, colbert=True) if self.muvera else self.outputs


@dataclass(frozen=True, slots=True)
class FusionWeights:
    """The weights of dense, sparse and ColBERT scores; equal by default, as in FlagEmbedding."""

    dense: float = 1.0
    sparse: float = 1.0
    colbert: float = 1.0

    def __post_init__(self) -> None:
        weights = self.dense, self.sparse, self.colbert
        if not all(np.isfinite(weights)) or min(weights) < 0 or not any(weights):
            raise InvalidRequestError("weights must be at least 0, and one of them above 0")


@dataclass(frozen=True)
class RerankRequest(ClientOptions):
    """A request to score passages for a query.

    `normalize` turns logits into probabilities. `instruction` is for rerankers that read one, and
    `weights` are for late interaction. `truncation` applies to passages.
    """

    query: str
    passages: list[str] | list[str | ImageInput]
    normalize: bool = False
    instruction: str | None = None
    weights: FusionWeights = field(default_factory=FusionWeights)
    truncation: TruncationOptions = CUT_AT_END

    @property
    def texts(self) -> list[str | ImageInput]:
        """The query and the passages."""
        return [self.query, *self.passages]


@dataclass(frozen=True)
class ExtractRequest(ClientOptions):
    """A request to find spans of texts.

    Only spans with one of the `labels`, by default all, and at least the score `threshold`, by
    default the model's, are returned. `aggregation`, by default simple, combines tokens into spans,
    as transformers' pipeline for token classification does.
    """

    texts: list[str]
    labels: list[str] | None = None
    threshold: float | None = None
    aggregation: Aggregation | None = None


AnyRequest = EmbedRequest | RerankRequest | ExtractRequest


class Purpose(Enum):
    """The purpose of a request, which decides the metrics that count it and its forwards."""

    EMBEDDING = auto()
    RERANKING = auto()
    TOKENIZING = auto()


def check_rendering(request: EmbedRequest) -> None:
    """Raise `InvalidRequestError` for options of the rendering that have no effect.

    This needs no model, so it is checked before a model is leased.
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
