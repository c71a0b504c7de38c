"""Cohere's embed and rerank API as `cohere` 5.21 sends and reads it (versions 1 and 2).

Jina, Voyage, Mixedbread and vLLM have the same rerank API.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from app.answers import (
    ranked_scores,
    render_list,
    render_object,
    text_as_json,
    usage_as_json,
    vector_as_json,
)
from app.context import RERANK, Dialect, Endpoint, ErrorFacts
from app.dialects import fields
from app.error_responses import NO_422
from app.handler import Call, embed, rerank
from app.images import ImageObject, TextsOrImages, read_images
from app.response_schemas import Usage
from app.routing import Router
from app.schemas import ForeignRequest
from smart_embedder.errors import InvalidRequestError
from smart_embedder.requests import EmbedRequest, RerankRequest
from smart_embedder.results import EmbeddingResult, FloatArray, RerankResult
from smart_embedder.vectors import quantize

_DOCUMENTS_PER_SEARCH_UNIT = 100


def _error_body(error: ErrorFacts, request_id: str) -> dict[str, Any]:
    """Build an error body with Cohere's `message` and Jina's `detail`."""
    return {"id": request_id, "message": error.message, "detail": error.message, "code": error.code}


COHERE = Dialect("Cohere, Jina, vLLM", _error_body, NO_422)

Documents = Annotated[
    TextsOrImages,
    BeforeValidator(
        lambda value: list(map(fields.extract_text, value)) if isinstance(value, list) else value
    ),
    Field(
        description="Texts, or objects with `text` or `image`.", json_schema_extra={"minItems": 1}
    ),
]


class DocumentsRequest(ForeignRequest):
    """A query and documents, each a string or an object with `text`."""

    dialect, endpoint, discriminator = COHERE, RERANK, "documents"
    example: ClassVar[Mapping[str, JsonValue]] = {
        "query": "What is hybrid search?",
        "documents": ["A recipe for bread.", "It joins two rankings."],
    }
    aliases = dict.fromkeys(("input", "inputs", "docs"), "documents")

    query: Annotated[
        str,
        BeforeValidator(fields.extract_text),
        Field(json_schema_extra={"minLength": 1, "pattern": r"\S"}),
    ]
    documents: Documents
    model: str | None = Field(None, description="Any name of the reranker.")
    instruction: str | None = Field(
        None, description="The task, for rerankers that read one: an extension."
    )
    instruct: str | None = Field(None, description="Another name for it.")
    top_n: int | None = Field(
        None, ge=0, description="How many documents to return, the best first; 0 and null: all."
    )
    top_k: int | None = Field(None, ge=0, description="Voyage's name for it.")
    return_documents: bool | None = Field(None, description="Whether the answer repeats the texts.")
    truncate: fields.Truncate = None
    truncation_side: fields.TruncationSide = None
    truncation: fields.Truncation = None
    rank_fields: Annotated[
        list[str] | None, FailFast(), Field(description="Only `text` is supported.")
    ] = None
    max_tokens_per_doc: int | None = Field(
        None, ge=1, description="Documents are cut to this many tokens."
    )
    max_chunks_per_doc: int | None = Field(
        None,
        ge=1,
        description="No document is split: above 1, one that is too long is an error by default.",
    )
    max_doc_length: int | None = Field(None, ge=1, description="Jina's name for it.")
    use_activation: bool | None = Field(
        None, description="vLLM's: false returns the model's raw scores."
    )
    activation: bool | None = Field(None, description="Its older name.")
    raw_scores: bool | None = Field(
        None, description="infinity's: true returns the model's raw scores."
    )
    # vLLM's.
    truncate_prompt_tokens: fields.TruncatePromptTokens = None
    max_tokens_per_query: Annotated[fields.Unsupported, fields.allow_only()] = None
    add_special_tokens: Annotated[fields.Unsupported, fields.allow_only(True)] = None
    padding: Annotated[fields.Unsupported, fields.allow_only("do_not_pad")] = None
    chat_template: Annotated[fields.Unsupported, fields.allow_only()] = None
    chat_template_kwargs: Annotated[fields.Unsupported, fields.allow_only()] = None
    # Jina's.
    max_query_length: Annotated[fields.Unsupported, fields.allow_only()] = None
    return_embeddings: Annotated[fields.Unsupported, fields.allow_only(False)] = None
    # Mixedbread's.
    rewrite_query: Annotated[fields.Unsupported, fields.allow_only(False)] = None

    @property
    def normalizes(self) -> bool:
        """Whether scores are probabilities; raises `InvalidRequestError` for fields that differ."""
        activation = fields.merge_aliases(self, "use_activation", "activation")
        if self.raw_scores and activation:
            raise InvalidRequestError(
                "the fields raw_scores and use_activation contradict each other: send one of them"
            )
        return activation is not False and not self.raw_scores


class DocumentText(BaseModel):
    """The text of a document."""

    text: str


class RankedDocument(BaseModel):
    """One document and its relevance."""

    index: Annotated[int, Field(description="Position in the request.")]
    relevance_score: float
    document: DocumentText | None = None


class VoyageDocument(BaseModel):
    """One document and its relevance, in Voyage's form."""

    index: int
    relevance_score: float
    document: str | None = None


class DocumentsMeta(BaseModel):
    """Cohere's billed units."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    tokens: dict[str, int]


class DocumentsResponse(BaseModel):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    object: Literal["list"]
    data: Annotated[list[VoyageDocument], Field(description="The results in Voyage's form.")]
    meta: DocumentsMeta
    usage: Usage


class CohereError(BaseModel):
    """An error in Cohere's form, with Jina's `detail`."""

    id: str
    message: str
    detail: str
    code: str


async def rerank_documents(body: DocumentsRequest, call: Call) -> Response:
    """Score the relevance of each document to the query from 0 to 1, the best first."""
    if body.rank_fields not in (None, [], ["text"]):
        raise InvalidRequestError(
            "the field rank_fields may name only text: put what the model should read there"
        )
    model = call.service.catalogue.reranker(body.model)
    truncate = fields.merge_aliases(body, "truncate", "truncation")
    if truncate is None and (body.max_chunks_per_doc or 1) > 1:
        truncate = False
    max_tokens = fields.merge_aliases(body, "max_tokens_per_doc", "max_doc_length")
    limit = fields.merge_aliases(body, "top_n", "top_k")
    if body.truncate_prompt_tokens is not None:
        models = await call.lease(model)
        scorer = models.reranker or models.embedder
        fields.check_prompt_tokens(body.truncate_prompt_tokens, scorer)
    request = RerankRequest(
        body.query,
        read_images(body.documents, "documents"),
        normalize=body.normalizes,
        instruction=fields.merge_aliases(body, "instruction", "instruct"),
        truncation=fields.build_truncation(truncate, body.truncation_side, max_tokens),
    )
    result = await rerank(call, request, model, "documents")
    name = "" if model is None else model.name
    ranked = ranked_scores(result)[: limit or None]
    render = partial(_render_ranking, body, ranked, result, name, call.context.request_id)
    return await call.render(render)


def _render_ranking(
    body: DocumentsRequest,
    ranked: list[tuple[int, np.float32]],
    result: RerankResult,
    model: str,
    request_id: str,
) -> Iterator[bytes]:
    results = render_list(_format_documents(body, ranked))
    answer: dict[str, Any] = {"id": request_id, "model": model, "results": results}
    # Clients of Voyage and Continue read only `data`.
    answer["object"] = "list"
    answer["data"] = render_list(_format_documents(body, ranked, as_voyage=True))
    search_units = math.ceil(len(body.documents) / _DOCUMENTS_PER_SEARCH_UNIT)
    answer["meta"] = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": search_units},
        "tokens": {"input_tokens": result.tokens},
    }
    return render_object(answer | {"usage": usage_as_json(result.tokens)})


def _format_documents(
    body: DocumentsRequest, ranked: list[tuple[int, np.float32]], *, as_voyage: bool = False
) -> Iterator[dict[str, Any]]:
    for index, score in ranked:
        item: dict[str, Any] = {"index": index, "relevance_score": score}
        if body.return_documents:
            text = text_as_json(body.documents[index])
            item["document"] = text if as_voyage else {"text": text}
        yield item


_TAG = {"name": COHERE.name, "description": "Reranking, and Cohere's embeddings."}

router = Router(COHERE, CohereError, [_TAG], tags=[_TAG["name"]])


class CohereEmbedRequest(ForeignRequest):
    """Texts or images to embed."""

    dialect, endpoint = COHERE, Endpoint("/v2/embed")
    example: ClassVar[Mapping[str, JsonValue]] = {
        "texts": ["What is hybrid search?"],
        "input_type": "search_query",
        "embedding_types": ["float"],
    }
    aliases = dict.fromkeys(("input", "text", "sentences"), "texts")

    texts: TextsOrImages
    model: str | None = Field(None, description="Any name of an embedding model.")
    input_type: (
        Literal["search_document", "search_query", "classification", "clustering", "image"] | None
    ) = Field(None, description="Queries get the model's prompt for queries, if it has one.")
    embedding_types: fields.EmbeddingTypes | None = Field(None, description="`float` by default.")
    output_dimension: int | None = Field(
        None, ge=1, description="Fewer dimensions, if the model supports that."
    )
    truncate: Annotated[
        Literal["NONE", "START", "END"] | None,
        fields.fold_case(str.upper),
        Field(description="The end at which a long text is cut; NONE: a long text is an error."),
    ] = None
    images: Annotated[
        fields.Unsupported, fields.allow_only(), Field(description="Instead of `texts`: data URLs.")
    ] = None
    inputs: Annotated[
        fields.Unsupported,
        fields.allow_only(),
        Field(description="Instead of `texts`: objects whose `content` is one text or image."),
    ] = None
    max_tokens: int | None = Field(None, ge=1, description="Texts are cut to this many tokens.")
    _field: str = PrivateAttr("texts")

    @property
    def field(self) -> str:
        """The field in which the client sent the texts and images."""
        return self._field

    @model_validator(mode="wrap")
    @classmethod
    def _move_inputs(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Move the texts and images of other fields to `texts`."""
        if not isinstance(value, dict) or value.get("texts"):
            return validate(value)
        for field in ("images", "inputs"):
            if isinstance(sent := value.get(field), list):
                texts = [_read_input(item, field) for item in sent]
                body = validate(value | {"texts": texts, field: None})
                body._field = field  # noqa: SLF001 - of this class
                return body
        return validate(value)


def _read_input(item: Any, field: str) -> Any:
    """Return an item of `images` or `inputs` as one of `texts`."""
    match field, item:
        case "images", str(url):
            return {"image": url}
        case "inputs", {"content": [{"type": "image_url", "image_url": {"url": str(url)}}]}:
            return {"image": url}
        case "inputs", {"content": [{"type": "text", "text": str(text)}]}:
            return text
    raise PydanticCustomError(
        "input",
        "each item of the field images must be a data URL, and each of inputs must have content "
        "of one text or image",
    )


class CohereEmbeddings(BaseModel):
    """Vectors by type."""

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"]


class CohereVectors(BaseModel):
    """Vectors without types."""

    id: str
    embeddings: list[list[float]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_floats"]


AnyCohereEmbeddings = Annotated[
    CohereVectors | CohereEmbeddings, Field(discriminator="response_type")
]


@router.work("/v2/embed", CohereEmbeddings, summary="Embed texts")
async def embed_v2(body: CohereEmbedRequest, call: Call) -> Response:
    """Embed each text as a dense vector of unit length, in each requested type."""
    return await _embed(body, call, "2")


@router.work("/v1/embed", AnyCohereEmbeddings, summary="Embed texts")
async def embed_v1(body: CohereEmbedRequest, call: Call) -> Response:
    """Embed texts as /v2/embed does; without `embedding_types` the vectors are a list."""
    return await _embed(body, call, "1")


async def _embed(body: CohereEmbedRequest, call: Call, version: str) -> Response:
    model = call.service.catalogue.embedder(body.model)
    input_type = body.input_type or "search_document"
    if input_type == "image":
        if not all(isinstance(item, ImageObject) for item in body.texts):
            raise InvalidRequestError("the field input_type may be image for images alone")
        input_type = "search_document"
    task = fields.TASKS[input_type]
    request = EmbedRequest(
        read_images(body.texts, body.field),
        normalize_dense=True,
        truncation=fields.build_truncation(body.truncate, max_tokens=body.max_tokens),
        # A model without a prompt for classification or clustering reads the text as a document.
        input_type=task.input_type or "document",
        preferred_prompts=task.prompts,
        dimensions=body.output_dimension,
    )
    result = await embed(call, request, field=body.field, model=model)
    render = partial(_render_embeddings, body, result, call.context.request_id, version)
    return await call.render(render)


def _render_embeddings(
    body: CohereEmbedRequest, result: EmbeddingResult, request_id: str, version: str
) -> Iterator[bytes]:
    vectors = [item.dense for item in result.embeddings if item.dense is not None]
    by_type = version != "1" or bool(body.embedding_types)
    types: list[fields.EmbeddingType] = body.embedding_types or ["float"]
    rendered: dict[str, Iterator[bytes]] = {name: _render_vectors(vectors, name) for name in types}
    return render_object(
        {
            "id": request_id,
            "embeddings": render_object(rendered) if by_type else rendered["float"],
            "texts": render_list(text_as_json(t) for t in body.texts if isinstance(t, str)),
            "meta": {
                "api_version": {"version": version},
                "billed_units": {"input_tokens": result.tokens},
            },
            "response_type": "embeddings_by_type" if by_type else "embeddings_floats",
        }
    )


def _render_vectors(vectors: list[FloatArray], type_: fields.EmbeddingType) -> Iterator[bytes]:
    quantized = (quantize(vector, fields.DTYPES[type_]).values for vector in vectors)
    return render_list(vector_as_json(values, as_base64=type_ == "base64") for values in quantized)
