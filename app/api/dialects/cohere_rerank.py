"""Reranking as Cohere, Jina and vLLM have it: documents in, relevance from 0 to 1 out."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    JsonValue,
    WithJsonSchema,
)
from starlette.responses import Response

from app.api.dialects.work import Passages, rerank
from app.api.handler import Call, Operation
from app.api.openapi import describe_work
from app.api.paths import RERANK as RERANK_ENDPOINT
from app.api.paths import Dialect
from app.api.rendering import by_falling_score, render_list, usage_as_json
from app.api.response_schemas import Usage
from app.api.schemas import ForeignRequest
from app.engine import TruncationOptions
from app.engine.types import RerankResult
from app.errors import InvalidRequestError

_EXAMPLE: dict[str, JsonValue] = {
    "query": "What is hybrid search?",
    "documents": ["A recipe for bread.", "It joins two rankings."],
}
_DOCUMENTS_OF_A_UNIT = 100


def _as_texts(value: Any) -> Any:
    """The text of each document that is an object."""
    if not isinstance(value, list):
        return value
    return [item["text"] if isinstance(item, dict) and "text" in item else item for item in value]


Documents = Annotated[
    list[str],
    FailFast(),
    BeforeValidator(_as_texts),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "object",
                        "properties": {"text": {"type": "string"}},
                        "required": ["text"],
                    },
                ]
            },
        }
    ),
]


class DocumentsRequest(ForeignRequest):
    """A query and documents, each a string or an object with `text`."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})
    example = _EXAMPLE

    query: Annotated[str, Field(json_schema_extra={"minLength": 1, "pattern": r"\S"})]
    documents: Documents
    model: Annotated[str | None, Field(description="Any name of the reranker.")] = None
    top_n: Annotated[
        int | None, Field(ge=0, description="The best so many; 0 and null are all.")
    ] = None
    return_documents: Annotated[
        bool | None, Field(description="Whether the answer repeats the texts.")
    ] = None
    instruction: Annotated[
        str | None, Field(description="The task, for Qwen3-Reranker: an extension.")
    ] = None
    use_activation: Annotated[
        bool | None, Field(description="vLLM's: false gives the model's raw scores.")
    ] = None
    rank_fields: Annotated[
        list[str] | None, Field(description="Only `text` is read of a document.")
    ] = None
    max_tokens_per_doc: Annotated[
        int | None, Field(ge=1, description="The most tokens of a document that are read.")
    ] = None
    max_chunks_per_doc: Annotated[
        int | None, Field(description="Refused: a document is not split here.")
    ] = None
    truncate_prompt_tokens: Annotated[int | None, Field(description="Refused.")] = None


class DocumentText(BaseModel):
    """A document as it was read."""

    text: str


class RankedDocument(BaseModel):
    """One document and its relevance."""

    index: Annotated[int, Field(description="Place in the request.")]
    relevance_score: float
    document: DocumentText | None = None


class DocumentsMeta(BaseModel):
    """Cohere's accounts."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    tokens: dict[str, int]


class DocumentsResponse(BaseModel):
    """The documents by falling relevance."""

    id: str
    model: str
    results: list[RankedDocument]
    meta: DocumentsMeta
    usage: Usage


class CohereError(BaseModel):
    """Cohere's shape of an error, with Jina's `detail`."""

    id: str
    message: str
    detail: str
    code: str


DESCRIPTION: dict[str, Any] = {"tags": ["Cohere, Jina, vLLM"]} | describe_work(
    "Order documents by relevance",
    DocumentsRequest,
    DocumentsResponse,
    404,
    422,
    error=CohereError,
)


async def _rerank(body: DocumentsRequest, call: Call) -> Response:
    model = call.service.catalogue.reranker(body.model)
    _check(body)
    truncation = TruncationOptions(max_tokens=body.max_tokens_per_doc)
    passages = Passages(body.query, body.documents, "documents", truncation)
    raw = body.use_activation is False
    result = await rerank(call, passages, model, instruction=body.instruction, raw=raw)
    name = "" if model is None else model.name
    render = partial(_render, body, result, name, call.context.request_id)
    return await call.render(render, sum(map(len, body.documents)))


def _check(body: DocumentsRequest) -> None:
    """Raise `InvalidRequestError` for options that would change the scores and are not computed."""
    if body.rank_fields not in (None, [], ["text"]):
        raise InvalidRequestError(
            "the field rank_fields may name text alone: put what is to be read there"
        )
    if body.max_chunks_per_doc is not None:
        raise InvalidRequestError(
            "the field max_chunks_per_doc is not read here, where a document is not split: leave "
            "it out"
        )
    if body.truncate_prompt_tokens not in (None, -1):
        raise InvalidRequestError("the field truncate_prompt_tokens is not read here: leave it out")


def _render(
    body: DocumentsRequest, result: RerankResult, model: str, request_id: str
) -> Iterator[bytes]:
    yield orjson.dumps({"id": request_id, "model": model})[:-1] + b',"results":'
    yield from render_list(_ranked_documents(body, result))
    yield b"," + orjson.dumps(_report(result, len(body.documents)))[1:]


def _ranked_documents(body: DocumentsRequest, result: RerankResult) -> Iterator[dict[str, Any]]:
    for index, score in by_falling_score(result.scores)[: body.top_n or None]:
        item: dict[str, Any] = {"index": index, "relevance_score": score}
        if body.return_documents:
            item["document"] = {"text": body.documents[index]}
        yield item


def _report(result: RerankResult, documents: int) -> dict[str, Any]:
    return {
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": math.ceil(documents / _DOCUMENTS_OF_A_UNIT)},
            "tokens": {"input_tokens": result.tokens},
        },
        "usage": usage_as_json(result.tokens),
    }


RERANK = Operation(Dialect.COHERE, RERANK_ENDPOINT, "documents", DocumentsRequest, _rerank)
