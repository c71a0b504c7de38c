"""The bodies of text-embeddings-inference's API."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    JsonValue,
    RootModel,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from smart_embedder.api.dialects.fields import AnyCase, Refused, TextsOrText, unless
from smart_embedder.api.schemas import ForeignRequest
from smart_embedder.engine import records
from smart_embedder.engine.records import DENSE, Outputs, TruncationOptions

# Of a part of a body, which the description shows within its whole.
_WITHOUT_EXAMPLE = ConfigDict(json_schema_extra=None)
_EXAMPLE: dict[str, JsonValue] = {"inputs": ["What is hybrid search?"]}
_Direction = Annotated[
    Literal["left", "right"] | None,
    AnyCase(str.lower),
    Field(description="Which end is cut, Left or Right; Right by default."),
]
_PromptName = Annotated[
    str | None, Field(description="A prompt of the model's sentence-transformers configuration.")
]
_TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class _Reading(ForeignRequest):
    """How texts are read."""

    aliases = dict.fromkeys(("input", "text", "sentences"), "inputs")

    truncate: bool | None = Field(
        None, description="Cut a text that is too long; else it is an error."
    )
    truncation_direction: _Direction = None

    @property
    def truncation(self) -> TruncationOptions:
        """These fields as the engine's options."""
        return TruncationOptions(bool(self.truncate), self.truncation_direction or "right")


class _Prompted(_Reading):
    """How texts to embed are read."""

    prompt_name: _PromptName = None

    def request(self, texts: list[str], outputs: Outputs = DENSE) -> records.EmbedRequest:
        """What is asked of the engine; `outputs` have unit length."""
        return records.EmbedRequest(
            texts,
            outputs,
            normalize_dense=True,
            truncation=self.truncation,
            prompt_name=self.prompt_name,
        )


class EmbedTokensRequest(_Prompted):
    """Embed the tokens of texts."""

    example = _EXAMPLE

    inputs: TextsOrText


class EmbedRequest(EmbedTokensRequest):
    """Embed texts."""

    normalize: bool | None = Field(None, description="To unit length, as by default.")
    dimensions: int | None = Field(None, ge=1, description="Fewer, if the model can.")


class SimilarityInputs(ForeignRequest):
    """A sentence, and those that it is compared with."""

    example: ClassVar[Mapping[str, JsonValue]] = {"source_sentence": "a", "sentences": ["b"]}
    model_config = _WITHOUT_EXAMPLE

    source_sentence: str
    sentences: Annotated[list[str], FailFast()]


class SimilarityParameters(_Prompted):
    """How the sentences are read."""

    example: ClassVar[Mapping[str, JsonValue]] = {"truncate": True}
    model_config = _WITHOUT_EXAMPLE


class SimilarityRequest(ForeignRequest):
    """Compare sentences."""

    example: ClassVar[Mapping[str, JsonValue]] = {
        "inputs": {
            "source_sentence": "What is hybrid search?",
            "sentences": ["A recipe for bread.", "It joins two rankings."],
        }
    }

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class RerankTextsRequest(_Reading):
    """Order texts by relevance."""

    example: ClassVar[Mapping[str, JsonValue]] = {
        "query": "What is hybrid search?",
        "texts": ["A recipe for bread.", "It joins two rankings."],
    }

    query: Annotated[str, Field(json_schema_extra={"minLength": 1, "pattern": r"\S"})]
    texts: Annotated[list[str], FailFast()]
    raw_scores: bool | None = Field(None, description="The model's own scores.")
    return_text: bool | None = Field(None, description="Repeat the texts.")


def _is_input(value: Any) -> bool:
    """Whether it is a list of one text or two."""
    return (
        isinstance(value, list)
        and 1 <= len(value) <= 2  # noqa: PLR2004
        and all(isinstance(each, str) for each in value)
    )


def _require_inputs(value: Any) -> Any:
    many = isinstance(value, list) and all(map(_is_input, value))
    if not (many or isinstance(value, str) or _is_input(value)):
        raise PydanticCustomError(
            "inputs", "send a text, a pair of texts, or a list of lists of one text or two"
        )
    return value


_PAIR_SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}
_INPUTS = {
    "anyOf": [{"type": "string"}, _PAIR_SCHEMA, {"type": "array", "items": _PAIR_SCHEMA}],
    "description": "A text, a pair of texts, or a list of lists of one text or two.",
}


class PredictRequest(_Reading):
    """Classify texts, or pairs of them."""

    example: ClassVar[Mapping[str, JsonValue]] = {"inputs": ["It rains.", "The ground is wet."]}

    inputs: Annotated[Any, BeforeValidator(_require_inputs), WithJsonSchema(_INPUTS)]
    raw_scores: bool | None = Field(None, description="The model's logits.")
    # Those of Hugging Face's client, which TEI does not have: raw_scores is the one that it does.
    parameters: Annotated[Refused, unless()] = None

    @property
    def is_single(self) -> bool:
        """Whether one text or one pair was sent, and not a list of them."""
        return isinstance(self.inputs, str) or _is_input(self.inputs)

    @property
    def pairs(self) -> list[tuple[str, str | None]]:
        """Every text, with the one that it is classified together with."""
        if isinstance(self.inputs, str):
            return [(self.inputs, None)]
        lists = [self.inputs] if self.is_single else self.inputs
        return [(first, *second) if second else (first, None) for first, *second in lists]


class TokenizeRequest(ForeignRequest):
    """Tokenise texts."""

    example = _EXAMPLE

    inputs: TextsOrText
    add_special_tokens: bool | None = None
    prompt_name: _PromptName = None


def _as_lists(value: Any) -> Any:
    """A list of lists for one list of ids."""
    if isinstance(value, list) and value and not isinstance(value[0], list):
        return [value]
    return value


class DecodeRequest(ForeignRequest):
    """Turn token ids into texts."""

    example: ClassVar[Mapping[str, JsonValue]] = {"ids": [101, 2054]}

    ids: Annotated[
        list[Annotated[list[_TokenId], FailFast()]], FailFast(), BeforeValidator(_as_lists)
    ]
    skip_special_tokens: bool | None = None


class Vectors(RootModel[list[list[float]]]):
    """One vector for each text."""


class TokenVectors(RootModel[list[list[list[float]]]]):
    """One vector for each token of each text."""


class SparseValue(BaseModel):
    """The weight of one token."""

    index: int
    value: float


class SparseVectors(RootModel[list[list[SparseValue]]]):
    """The weights of each text."""


class Similarities(RootModel[list[float]]):
    """The cosine of each sentence with the source."""


class Rank(BaseModel):
    """One text and its score."""

    index: int
    score: float
    text: str | None = None


class Ranks(RootModel[list[Rank]]):
    """The texts by falling score."""


class Prediction(BaseModel):
    """One label and its score."""

    score: float
    label: str


class Predictions(RootModel[list[Prediction] | list[list[Prediction]]]):
    """The labels by falling score; a list of them for each of several inputs."""


class Token(BaseModel):
    """One token, and the characters of the text that it stands for."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Tokens(RootModel[list[list[Token]]]):
    """The tokens of each text."""


class Texts(RootModel[list[str]]):
    """One text for each list of ids."""


class Info(BaseModel):
    """A model and the limits of its service."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, dict[str, Any]]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    vector_space: Annotated[dict[str, str], Field(description="An extension.")]
    precision: Annotated[dict[str, str], Field(description="An extension.")]
    tokenization_workers: int
    version: str


class TeiError(BaseModel):
    """text-embeddings-inference's shape of an error."""

    error: str
    error_type: Literal[
        "Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty", "Unauthorized"
    ]
