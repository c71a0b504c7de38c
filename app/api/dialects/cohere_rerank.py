"""Reranking as Cohere, Jina and vLLM have it: documents in, relevance from 0 to 1 out."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
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

from app.api.dialects.fields import (
    TEXT_OR_OBJECT,
    Refused,
    Truncate,
    Truncation,
    TruncationSide,
    as_text,
    truncation_of,
    unless,
    value_of,
)
from app.api.dialects.work import Passages, rerank
from app.api.handler import Call, Operation
from app.api.openapi import describe_work
from app.api.paths import RERANK as RERANK_ENDPOINT
from app.api.paths import Dialect
from app.api.rendering import by_falling_score, render_list, text_as_json, usage_as_json
from app.api.response_schemas import Usage
from app.api.schemas import ForeignRequest
from app.engine.types import RerankResult
from app.errors import InvalidRequestError

_EXAMPLE: dict[str, JsonValue] = {
    "query": "What is hybrid search?",
    "documents": ["A recipe for bread.", "It joins two rankings."],
}
_DOCUMENTS_OF_A_UNIT = 100


def _as_texts(value: Any) -> Any:
    return list(map(as_text, value)) if isinstance(value, list) else value


Documents = Annotated[
    list[str],
    FailFast(),
    BeforeValidator(_as_texts),
    WithJsonSchema({"type": "array", "minItems": 1, "items": TEXT_OR_OBJECT}),
]


class DocumentsRequest(ForeignRequest):
    """A query and documents, each a string or an object with `text`."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})
    example = _EXAMPLE
    aliases = dict.fromkeys(("input", "inputs", "docs"), "documents")

    query: Annotated[
        str,
        BeforeValidator(as_text),
        Field(json_schema_extra={"minLength": 1, "pattern": r"\S"}),
    ]
    documents: Documents
    model: Annotated[str | None, Field(description="Any name of the reranker.")] = None
    top_n: Annotated[
        int | None, Field(ge=0, description="The best so many; 0 and null are all.")
    ] = None
    top_k: Annotated[int | None, Field(ge=0, description="Voyage's name for it.")] = None
    return_documents: Annotated[
        bool | None, Field(description="Whether the answer repeats the texts.")
    ] = None
    instruction: Annotated[
        str | None, Field(description="The task, for Qwen3-Reranker: an extension.")
    ] = None
    use_activation: Annotated[
        bool | None, Field(description="vLLM's: false gives the model's raw scores.")
    ] = None
    activation: Annotated[bool | None, Field(description="Its older name.")] = None
    truncate: Truncate = None
    truncation: Truncation = None
    truncation_side: TruncationSide = None
    rank_fields: Annotated[
        list[str] | None, FailFast(), Field(description="Only `text` is read of a document.")
    ] = None
    max_tokens_per_doc: Annotated[
        int | None, Field(ge=1, description="The most tokens of a document that are read.")
    ] = None
    max_doc_length: Annotated[int | None, Field(ge=1, description="Jina's name for it.")] = None
    # Cohere's: a document is not split here.
    max_chunks_per_doc: Annotated[Refused, unless()] = None
    # vLLM's.
    truncate_prompt_tokens: Annotated[Refused, unless(-1)] = None
    max_tokens_per_query: Annotated[Refused, unless()] = None
    add_special_tokens: Annotated[Refused, unless(True)] = None
    padding: Annotated[Refused, unless("do_not_pad")] = None
    chat_template: Annotated[Refused, unless()] = None
    chat_template_kwargs: Annotated[Refused, unless()] = None
    # Jina's.
    max_query_length: Annotated[Refused, unless()] = None
    return_embeddings: Annotated[Refused, unless(False)] = None
    # Mixedbread's.
    rewrite_query: Annotated[Refused, unless(False)] = None

    @property
    def is_voyages(self) -> bool:
        """Whether it has fields that Voyage's clients send, which read another list."""
        return not self.model_fields_set.isdisjoint({"top_k", "truncation"})


class DocumentText(BaseModel):
    """A document as it was read."""

    text: str


class RankedDocument(BaseModel):
    """One document and its relevance."""

    index: Annotated[int, Field(description="Place in the request.")]
    relevance_score: float
    document: DocumentText | None = None


class VoyageDocument(BaseModel):
    """One document and its relevance, as Voyage has it."""

    index: int
    relevance_score: float
    document: str | None = None


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
    object: Annotated[Literal["list"] | None, Field(description="Beside data.")] = None
    data: Annotated[
        list[VoyageDocument] | None,
        Field(description="The same as Voyage has it, for a request with top_k or truncation."),
    ] = None
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
    if body.rank_fields not in (None, [], ["text"]):
        raise InvalidRequestError(
            "the field rank_fields may name text alone: put what is to be read there"
        )
    model = call.service.catalogue.reranker(body.model)
    how = value_of(body, "truncate", "truncation")
    longest = value_of(body, "max_tokens_per_doc", "max_doc_length")
    truncation = truncation_of(how, body.truncation_side, longest)
    passages = Passages(body.query, body.documents, "documents", truncation)
    most = value_of(body, "top_n", "top_k")
    raw = value_of(body, "use_activation", "activation") is False
    result = await rerank(call, passages, model, instruction=body.instruction, raw=raw)
    name = "" if model is None else model.name
    ranked = by_falling_score(result.scores)[: most or None]
    render = partial(_render, body, ranked, result, name, call.context.request_id)
    return await call.render(render)


def _render(
    body: DocumentsRequest,
    ranked: list[tuple[int, np.float32]],
    result: RerankResult,
    model: str,
    request_id: str,
) -> Iterator[bytes]:
    yield orjson.dumps({"id": request_id, "model": model})[:-1] + b',"results":'
    yield from render_list(_ranked_documents(body, ranked))
    if body.is_voyages:
        yield b',"object":"list","data":'
        yield from render_list(_ranked_documents(body, ranked, as_voyage=True))
    yield b"," + orjson.dumps(_report(result, len(body.documents)))[1:]


def _ranked_documents(
    body: DocumentsRequest, ranked: list[tuple[int, np.float32]], *, as_voyage: bool = False
) -> Iterator[dict[str, Any]]:
    for index, score in ranked:
        item: dict[str, Any] = {"index": index, "relevance_score": score}
        if body.return_documents:
            text = text_as_json(body.documents[index])
            item["document"] = text if as_voyage else {"text": text}
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
