"""OpenAI's embeddings and list of models."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from starlette.responses import JSONResponse, Response

from app.api.dialects.fields import TextsOrText
from app.api.dialects.work import embed, embedder_of, input_type_of
from app.api.handler import Call, Operation, ServiceDep, get_and_head, respond
from app.api.model_catalogue import ModelCatalogue, ServedModel
from app.api.openapi import BEARER, describe_body, error_responses
from app.api.paths import OPENAI_EMBEDDINGS, Dialect
from app.api.rendering import (
    OPTIONS,
    base64_of,
    estimate_bytes,
    render_matrix,
    sparse_as_json,
    truncations_as_json,
)
from app.api.schemas import ForeignRequest, SparseIndices, TruncationWarning, Usage
from app.engine import EmbeddingOptions
from app.engine.options import InputType
from app.engine.types import EmbeddingResult, Outputs, TextEmbedding
from app.errors import InvalidRequestError

router = APIRouter(tags=["OpenAI"], dependencies=[BEARER])

_EXAMPLE: dict[str, JsonValue] = {"input": ["What is hybrid search?"]}
# What servers and clients call them.
_INPUT_TYPES: dict[str, InputType] = {
    "query": "query",
    "document": "document",
    "passage": "document",
    "search_query": "query",
    "search_document": "document",
}


class OpenAIEmbeddingRequest(ForeignRequest):
    """Texts to embed."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})
    example = _EXAMPLE

    input: TextsOrText
    model: Annotated[
        str | None, Field(description="Any name of an embedding model; see /v1/models.")
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        Field(description="base64 is of little-endian float32; the official clients ask for it."),
    ] = None
    dimensions: Annotated[int | None, Field(ge=1, description="Fewer, if the model can.")] = None
    output_dimension: Annotated[int | None, Field(ge=1, description="The same.")] = None
    input_type: Annotated[
        str | None, Field(description="query or document, for models with a prompt for it.")
    ] = None
    truncate_prompt_tokens: Annotated[int | None, Field(description="Refused.")] = None
    late_chunking: Annotated[bool | None, Field(description="Refused.")] = None
    return_sparse: Annotated[
        bool | None, Field(description="Lexical weights, too: an extension.")
    ] = None
    return_colbert: Annotated[
        bool | None, Field(description="One vector for each token, too: an extension.")
    ] = None


class OpenAIEmbedding(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[
        list[float] | str, Field(description="Of unit length; a string with base64.")
    ]
    sparse: SparseIndices | None = None
    colbert: list[list[float]] | None = None


class OpenAIEmbeddings(BaseModel):
    """Vectors in the order of the request."""

    object: Literal["list"]
    data: list[OpenAIEmbedding]
    model: str
    usage: Usage
    warnings: Annotated[
        list[TruncationWarning] | None, Field(description="Only where a text was cut.")
    ] = None


class OpenAIModel(BaseModel):
    """A name by which a model can be asked for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class OpenAIModels(BaseModel):
    """Every name of every model."""

    object: Literal["list"]
    data: list[OpenAIModel]


class OpenAIErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(BaseModel):
    """OpenAI's shape of an error."""

    error: OpenAIErrorDetails


@router.post(
    OPENAI_EMBEDDINGS.path,
    summary="Embed texts",
    response_model=OpenAIEmbeddings,
    responses=error_responses(
        400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504, model=OpenAIError
    ),
    openapi_extra=describe_body(OpenAIEmbeddingRequest),
)
@router.post("/models/{model:path}/embeddings", include_in_schema=False)
@router.post("/models/{model:path}/v1/embeddings", include_in_schema=False)
async def create_embeddings(request: Request, service: ServiceDep) -> Response:
    """A dense vector of each text, of unit length. /embeddings takes the same body."""
    return await respond(request, service, EMBEDDINGS)


async def _embed(body: OpenAIEmbeddingRequest, call: Call) -> Response:
    of_path = "model" in call.request.path_params
    model = embedder_of(call) if of_path else call.service.catalogue.embedder(body.model)
    outputs = Outputs(True, bool(body.return_sparse), bool(body.return_colbert))
    _check(body)
    options = EmbeddingOptions(
        dimensions=body.dimensions if body.dimensions is not None else body.output_dimension,
        input_type=_input_type(body, call, model),
    )
    result = await embed(call, body.input, outputs, field="input", model=model, options=options)
    render = partial(_render, result, model, as_base64=body.encoding_format == "base64")
    return await call.render(render, estimate_bytes([], result))


def _check(body: OpenAIEmbeddingRequest) -> None:
    """Refuse what other servers read here, would change the numbers, and cannot be had."""
    if body.truncate_prompt_tokens not in {None, -1} or body.late_chunking:
        field = "late_chunking" if body.late_chunking else "truncate_prompt_tokens"
        raise InvalidRequestError(f"the field {field} is not read here: leave it out")


def _input_type(body: OpenAIEmbeddingRequest, call: Call, model: ServedModel) -> InputType | None:
    """Whether the texts are queries or documents, where that changes what the model reads."""
    if body.input_type is None:
        return None
    known = _INPUT_TYPES.get(body.input_type)
    if known is None:
        raise InvalidRequestError(
            f"the field input_type is unknown: send {' or '.join(_INPUT_TYPES)}"
        )
    return input_type_of(call, model, known)


def _render(result: EmbeddingResult, model: ServedModel, *, as_base64: bool) -> Iterator[bytes]:
    yield b'{"object":"list","data":['
    for index, embedding in enumerate(result.embeddings):
        yield b'%s{"object":"embedding","index":%d' % (b"," if index else b"", index)
        yield from _render_vectors(embedding, as_base64=as_base64)
        yield b"}"
    trailer: dict[str, Any] = {
        "model": model.name,
        "usage": {"prompt_tokens": result.tokens, "total_tokens": result.tokens},
    }
    if result.truncations:
        trailer["warnings"] = truncations_as_json(result, "input")
    yield b"]," + orjson.dumps(trailer)[1:]


def _render_vectors(embedding: TextEmbedding, *, as_base64: bool) -> Iterator[bytes]:
    yield b',"embedding":'
    dense = embedding.dense
    yield (
        base64_of(dense) if as_base64 and dense is not None else orjson.dumps(dense, option=OPTIONS)
    )
    if embedding.sparse is not None:
        yield b',"sparse":'
        yield orjson.dumps(sparse_as_json(embedding.sparse, as_indices=True), option=OPTIONS)
    if embedding.colbert is not None:
        yield b',"colbert":'
        yield from render_matrix(embedding.colbert)


EMBEDDINGS = Operation(Dialect.OPENAI, OPENAI_EMBEDDINGS, "input", OpenAIEmbeddingRequest, _embed)


@get_and_head(
    router,
    "/v1/models",
    summary="The names of the models",
    response_model=OpenAIModels,
    responses=error_responses(401, model=OpenAIError),
)
@get_and_head(router, "/models", include_in_schema=False)
async def list_models(service: ServiceDep) -> Response:
    """Hub ids, short names and aliases; every embedding model has one with `embed` in it."""
    catalogue = service.catalogue
    data = [_describe(name, catalogue) for model in catalogue.models for name in model.names]
    return JSONResponse({"object": "list", "data": data})


@get_and_head(
    router,
    "/v1/models/{model:path}",
    summary="One of them",
    response_model=OpenAIModel,
    responses=error_responses(401, 404, model=OpenAIError),
)
async def show_model(model: str, service: ServiceDep) -> Response:
    """The model with that name."""
    service.catalogue.find(model)
    return JSONResponse(_describe(model, service.catalogue))


def _describe(name: str, catalogue: ModelCatalogue) -> dict[str, JsonValue]:
    return {
        "id": name,
        "object": "model",
        "created": catalogue.created,
        "owned_by": "smart-embedder",
    }
