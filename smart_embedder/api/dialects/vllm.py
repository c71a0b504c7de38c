"""vLLM's scores of pairs of texts."""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import orjson
from pydantic import BaseModel, Field, JsonValue
from starlette.responses import Response

from smart_embedder.api.answers import Usage
from smart_embedder.api.context import Dialect, Endpoint, ErrorFacts
from smart_embedder.api.dialects import fields, openai
from smart_embedder.api.errors import NO_422
from smart_embedder.api.handler import Call, rerank
from smart_embedder.api.openapi import BEARER, Router
from smart_embedder.api.rendering import OPTIONS, usage_as_json
from smart_embedder.engine.records import RerankResult
from smart_embedder.engine.scheduling.job import Purpose
from smart_embedder.errors import EmptyInputError, InvalidRequestError


class ScoreRequest(fields.ScoresRequest):
    """One text and those to compare it with, or two lists of equal length."""

    example: ClassVar[Mapping[str, JsonValue]] = {
        "text_1": "What is hybrid search?",
        "text_2": ["A recipe for bread.", "It joins two rankings."],
    }
    aliases = dict.fromkeys(("queries", "query", "data_1"), "text_1") | dict.fromkeys(
        ("documents", "items", "data_2"), "text_2"
    )

    text_1: fields.TextsOrText
    text_2: fields.TextsOrText
    max_tokens_per_doc: int | None = Field(
        None, ge=1, description="The most tokens of text_2 that are read."
    )


class PairScore(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(BaseModel):
    """A score from 0 to 1 for each pair, in the order of the request."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: Usage


class VllmError(BaseModel):
    """vLLM's shape of an error: the newer one in `error`, and the older one."""

    error: dict[str, Any]
    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: int


def _error_body(error: ErrorFacts, _request_id: str) -> dict[str, Any]:
    details = openai.error_details(error) | {"code": NO_422.get(error.code, error.status)}
    return {"error": details, "object": "error"} | details


VLLM = Dialect("vLLM", _error_body, NO_422)

router = Router(VLLM, VllmError, tags=["Cohere, Jina, vLLM"], dependencies=[BEARER])


@router.operation(
    Endpoint("/score", Purpose.RERANKING),
    "text_1",
    ScoreRequest,
    "/score",
    "/v1/score",
    **router.describe_work("Score pairs of texts", ScoreRequest, ScoreResponse),
)
async def create_scores(body: ScoreRequest, call: Call) -> Response:
    """How relevant each of `text_2` is to `text_1`, or to the one in its place."""
    model = call.service.catalogue.reranker(body.model)
    if not body.text_1:
        raise EmptyInputError("the list text_1 is empty: send at least one text")
    if len(body.text_1) not in {1, len(body.text_2)}:
        raise InvalidRequestError(
            f"text_1 holds {len(body.text_1)} texts and text_2 {len(body.text_2)}: send one in "
            "text_1, or as many as in text_2"
        )
    queries = body.text_1 if len(body.text_1) > 1 else body.text_1[0]
    truncation = fields.truncation_of(body.truncate, body.truncation_side, body.max_tokens_per_doc)
    request = body.request(queries, body.text_2, truncation)
    result = await rerank(call, request, model, "text_2")
    name = "" if model is None else model.name
    render = partial(_render, result, name, call.context.request_id)
    return await call.render(render)


def _render(result: RerankResult, model: str, request_id: str) -> Iterator[bytes]:
    data = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(np.array(result.scores, dtype=np.float32))
    ]
    answer = {
        "id": request_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage_as_json(result.tokens),
    }
    yield orjson.dumps(answer, option=OPTIONS)
