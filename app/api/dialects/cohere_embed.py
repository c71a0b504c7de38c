"""Cohere's vectors of texts, in full or in fewer bits."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from app.api.dialects.cohere_rerank import CohereError
from app.api.dialects.fields import (
    DTYPES,
    TASKS,
    AnyCase,
    EmbeddingType,
    EmbeddingTypes,
    Refused,
    truncation_of,
    unless,
)
from app.api.dialects.work import embed
from app.api.handler import Call, Operation, ServiceDep, respond
from app.api.openapi import BEARER, describe_work
from app.api.paths import COHERE_EMBED, Dialect
from app.api.rendering import (
    OPTIONS,
    base64_of,
    render_items,
    render_list,
    text_as_json,
)
from app.api.schemas import ForeignRequest
from app.engine import EmbeddingOptions
from app.engine.types import EmbeddingResult, FloatArray, Outputs
from app.vectors.quantization import quantize

router = APIRouter(tags=["Cohere, Jina, vLLM"], dependencies=[BEARER])

_EXAMPLE: dict[str, JsonValue] = {
    "texts": ["What is hybrid search?"],
    "input_type": "search_query",
    "embedding_types": ["float"],
}


class CohereEmbedRequest(ForeignRequest):
    """Texts to embed."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})
    example = _EXAMPLE
    aliases = dict.fromkeys(("input", "text", "sentences"), "texts")

    texts: Annotated[list[str], FailFast()]
    model: Annotated[str | None, Field(description="Any name of an embedding model.")] = None
    input_type: Annotated[
        Literal["search_document", "search_query", "classification", "clustering"] | None,
        Field(description="Queries get the model's prompt for queries, where it has one."),
    ] = None
    embedding_types: Annotated[EmbeddingTypes | None, Field(description="`float` by default.")] = (
        None
    )
    output_dimension: Annotated[int | None, Field(ge=1, description="Fewer, if the model can.")] = (
        None
    )
    truncate: Annotated[
        Literal["NONE", "START", "END"] | None,
        AnyCase(str.upper),
        Field(description="Which end of a text that is too long is cut; NONE: it is an error."),
    ] = None
    images: Annotated[Refused, unless()] = None
    inputs: Annotated[
        Refused, unless(), Field(description="Instead of texts: each with `content` of one text.")
    ] = None
    max_tokens: Annotated[int | None, Field(ge=1, description="Tokens that are read.")] = None

    @model_validator(mode="before")
    @classmethod
    def _read_inputs(cls, value: Any) -> Any:
        """Take the texts from `inputs` where these stand in their place."""
        if not isinstance(value, dict) or "texts" in value:
            return value
        inputs = value.get("inputs")
        if not isinstance(inputs, list):
            return value
        texts = [_text_of(each) for each in inputs]
        if None in texts:
            raise PydanticCustomError(
                "inputs", "of the field inputs, only content of one text is read: send texts"
            )
        return value | {"texts": texts, "inputs": None}


def _text_of(item: Any) -> str | None:
    """The text of one of Cohere's `inputs`; None for one with an image, or with several parts."""
    match item:
        case {"content": [{"type": "text", "text": str(text)}]}:
            return text
    return None


class CohereEmbeddings(BaseModel):
    """Vectors by type; in v1 without `embedding_types`, a list of lists."""

    id: str
    embeddings: dict[str, list[Any]] | list[list[float]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: str


_DESCRIPTION = describe_work(
    "Embed texts", CohereEmbedRequest, CohereEmbeddings, 404, error=CohereError
)


@router.post("/v2/embed", **_DESCRIPTION)
async def create_embeddings(request: Request, service: ServiceDep) -> Response:
    """A dense vector of each text, of unit length, in each of the types asked for."""
    return await respond(request, service, _EMBED)


@router.post("/v1/embed", **_DESCRIPTION)
async def create_embeddings_v1(request: Request, service: ServiceDep) -> Response:
    """The same; without `embedding_types` the vectors are a list and not an object."""
    return await respond(request, service, _EMBED_V1)


async def _embed(body: CohereEmbedRequest, call: Call, *, version: str = "2") -> Response:
    model = call.service.catalogue.embedder(body.model)
    task = TASKS[body.input_type or "search_document"]
    options = EmbeddingOptions(
        truncation_of(body.truncate, max_tokens=body.max_tokens),
        # Where a model has no prompt for classification or clustering, they are documents, too.
        input_type=task.input_type or "document",
        preferred_prompts=task.prompts,
        dimensions=body.output_dimension,
    )
    outputs = Outputs(dense=True)
    result = await embed(call, body.texts, outputs, field="texts", model=model, options=options)
    render = partial(_render, body, result, call.context.request_id, version)
    return await call.render(render)


def _render(
    body: CohereEmbedRequest, result: EmbeddingResult, request_id: str, version: str
) -> Iterator[bytes]:
    vectors = [each.dense for each in result.embeddings if each.dense is not None]
    by_type = version != "1" or bool(body.embedding_types)
    yield orjson.dumps({"id": request_id})[:-1] + b',"embeddings":'
    if by_type:
        kinds: list[EmbeddingType] = body.embedding_types or ["float"]
        for index, kind in enumerate(dict.fromkeys(kinds)):
            yield (b"," if index else b"{") + b'"%s":' % kind.encode()
            yield from render_items(_rendered(vectors, kind))
        yield b"}"
    else:
        yield from render_items(_rendered(vectors, "float"))
    yield b',"texts":'
    yield from render_list(map(text_as_json, body.texts))
    rest = {
        "meta": {
            "api_version": {"version": version},
            "billed_units": {"input_tokens": result.tokens},
        },
        "response_type": "embeddings_by_type" if by_type else "embeddings_floats",
    }
    yield b"," + orjson.dumps(rest)[1:]


def _rendered(vectors: list[FloatArray], kind: EmbeddingType) -> Iterator[tuple[bytes]]:
    for vector in vectors:
        values = quantize(vector, DTYPES[kind]).values
        yield (base64_of(values) if kind == "base64" else orjson.dumps(values, option=OPTIONS),)


_EMBED = Operation(Dialect.COHERE, COHERE_EMBED, "texts", CohereEmbedRequest, _embed)
_EMBED_V1 = Operation(
    Dialect.COHERE, COHERE_EMBED, "texts", CohereEmbedRequest, partial(_embed, version="1")
)
