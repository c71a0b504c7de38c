"""Request bodies, responses and errors of SIE's API, as `sie-sdk` 0.10 sends and reads them."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from app.context import Dialect, Endpoint, ErrorFacts
from app.dialects import fields
from app.error_responses import NO_422
from app.images import OneError
from app.schemas import ForeignRequest, RequestModel
from smart_embedder.requests import ImageInput, Purpose

# The codes by which its client retries, or raises errors of their own, where ours differ.
_CODES = {
    "loading": "MODEL_LOADING",
    "model_not_loaded": "MODEL_LOAD_FAILED",
    "model_too_large": "MODEL_LOAD_FAILED",
    "out_of_memory": "RESOURCE_EXHAUSTED",
    "draining": "QUEUE_FULL",
    "rate_limited": "RATE_LIMIT",
    "text_too_long": "INPUT_TOO_LONG",
    "body_too_large": "INPUT_TOO_LONG",
}
_REFUSED = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)


def _error_body(error: ErrorFacts, request_id: str) -> dict[str, Any]:
    """Build the error as its client reads it."""
    default = "INVALID_INPUT" if error.status in _REFUSED else error.code.upper()
    code = _CODES.get(error.code, default)
    return {"detail": {"code": code, "message": error.message, "request_id": request_id}}


SIE = Dialect(
    "SIE", _error_body, {**NO_422, **dict.fromkeys(("model_not_loaded", "model_too_large"), 502)}
)

_Refused = Annotated[fields.Unsupported, fields.allow_only()]


class _Item(RequestModel):
    """The name of an item, and the content that is refused."""

    model_config = ConfigDict(extra="ignore")
    example: ClassVar[Mapping[str, JsonValue]] = {"text": "What is hybrid search?"}

    id: str | None = None
    audio: _Refused = None
    video: _Refused = None
    document: _Refused = None


class SieText(_Item):
    """A text. Pictures, sound and documents are refused."""

    images: _Refused = None
    text: str


class SieImage(RequestModel):
    """A file of a picture; JSON holds its base64."""

    model_config = ConfigDict(extra="ignore")
    example: ClassVar[Mapping[str, JsonValue]] = {"data": "iVBORw0KGgo="}

    data: Annotated[bytes | str, OneError("picture", "send the picture's file, in base64 in JSON")]


class SieItem(_Item):
    """A text, or one picture if the model reads them. Sound and documents are refused."""

    images: Annotated[list[SieImage] | None, FailFast()] = None
    text: str | None = None

    @model_validator(mode="after")
    def _hold_one_input(self) -> Self:
        if len(self.images or ()) != (self.text is None):
            raise PydanticCustomError("inputs", "send a text or one picture")
        return self

    @property
    def input(self) -> str | ImageInput:
        """The text or the picture."""
        if self.text is not None:
            return self.text
        [image] = self.images or []
        return ImageInput(image.data)


_NOT_EMPTY = Field(json_schema_extra={"minItems": 1})
Items = Annotated[list[SieItem], FailFast(), _NOT_EMPTY]


class EncodeOptions(RequestModel):
    """How texts are embedded."""

    is_query: bool | None = Field(None, description="Whether the texts are queries.")
    normalize: bool | None = Field(None, description="false: the raw vectors of Qwen3.")
    muvera: dict[str, Any] | None = Field(
        None, max_length=0, description="{}: `dense` is MUVERA's vector, as in /embeddings/."
    )


class EncodeParams(RequestModel):
    """Which vectors are returned, and how texts are embedded."""

    model_config = ConfigDict(extra="ignore")

    output_types: Annotated[
        list[Literal["dense", "sparse", "multivector"]] | None,
        FailFast(),
        Field(description="`dense` by default."),
    ] = None
    output_dtype: Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] | None = None
    instruction: str | None = Field(None, description="Put before each text.")
    options: EncodeOptions | None = None


class _SieRequest(ForeignRequest):
    """A body in JSON or MessagePack."""

    dialect, reads_message_pack = SIE, True
    aliases = dict.fromkeys(("inputs", "input", "texts"), "items")


class EncodeBody(_SieRequest):
    """Texts and pictures to embed."""

    endpoint = Endpoint("/v1/encode")
    example: ClassVar[Mapping[str, JsonValue]] = {"items": [{"text": "What is hybrid search?"}]}

    items: Items
    params: EncodeParams | None = None


class ScoreBody(_SieRequest):
    """A query, and texts or pictures to score."""

    endpoint = Endpoint("/v1/score", Purpose.RERANKING)
    example: ClassVar[Mapping[str, JsonValue]] = {
        "query": {"text": "What is hybrid search?"},
        "items": [{"text": "It joins two rankings."}],
    }

    query: SieText
    items: Items
    instruction: str | None = Field(None, description="The task, for rerankers that read one.")
    options: _Refused = None


class ExtractOptions(RequestModel):
    """Which spans are returned."""

    threshold: Annotated[float | None, Field(ge=0, le=1)] = None


class ExtractParams(RequestModel):
    """Which spans are returned."""

    model_config = ConfigDict(extra="ignore")

    labels: Annotated[list[str] | None, FailFast()] = None
    output_schema: _Refused = None
    instruction: _Refused = None
    options: ExtractOptions | None = None


class ExtractItems(_SieRequest):
    """Texts in which to find spans."""

    endpoint = Endpoint("/v1/extract")
    example: ClassVar[Mapping[str, JsonValue]] = {"items": [{"text": "Ada lived in London."}]}

    items: Annotated[list[SieText], FailFast(), _NOT_EMPTY]
    params: ExtractParams | None = None


class SieScores(BaseModel):
    """The scores of the items, the best first."""

    model: str
    query_id: str | None
    scores: list[dict[str, Any]]
    usage: dict[str, int]


class SieSpans(BaseModel):
    """The spans of each item, as `entities`."""

    model: str
    items: list[dict[str, Any]]
    usage: dict[str, int]


class SieVectors(SieSpans):
    """The vectors of each item, with their shapes and types."""

    timing: dict[str, float]


class SieError(BaseModel):
    """An error with a code that its client knows."""

    detail: dict[str, str]
