"""POST /embeddings/: texts in, dense, sparse and ColBERT vectors out."""

from collections.abc import Callable, Iterable
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.checks import check_texts, check_truncation
from app.api.dialects import openai
from app.api.dialects.work import vectors
from app.api.formats import json_answer
from app.api.formats.answer import EmbeddingAnswer, ModelNames, VectorOptions
from app.api.formats.negotiation import BINARY, media_type_of
from app.api.handler import LARGE_RESPONSE_BYTES, Call, Operation, ServiceDep, respond
from app.api.openapi import BEARER, describe_body, error_responses
from app.api.paths import NATIVE_EMBEDDINGS, Dialect
from app.api.rendering import JSON, Chunk, estimate_bytes
from app.api.response_schemas import Base64Response, EmbeddingResponse
from app.api.schemas import EmbeddingRequest
from app.engine.types import Outputs
from app.errors import InvalidRequestError
from app.settings import Settings
from app.settings.model_names import public_name

_BYTES = {"schema": {"type": "string", "format": "binary"}}
_NOT_IN_JSON = ("float16", "bfloat16")

router = APIRouter(tags=["embeddings"], dependencies=[BEARER])


@router.post(
    NATIVE_EMBEDDINGS.path,
    summary="Embed texts",
    response_model=EmbeddingResponse | Base64Response,
    responses=error_responses(400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504)
    | {200: {"content": dict.fromkeys(BINARY, _BYTES)}},
    openapi_extra=describe_body(EmbeddingRequest),
)
async def create_embeddings(request: Request, service: ServiceDep) -> Response:
    """Dense, sparse and ColBERT vectors of each text, from one forward pass.

    A body with `input` is read as OpenAI's, as at /v1/embeddings.
    """
    return await respond(request, service, _OPERATION, openai.EMBEDDINGS)


async def _embed(body: EmbeddingRequest, call: Call) -> Response:
    settings, sentences = call.service.settings, body.sentences
    media_type, wanted = media_type_of(call.request), _vector_options(body)
    _check(body, settings)
    _check_format(body, media_type)
    wanted.check(queries=body.input_type == "query", tokens=body.return_tokens)
    result = await vectors(
        call,
        sentences,
        wanted.needed,
        options=body.options,
        normalize=body.normalize_dense,
    )
    answer = EmbeddingAnswer(sentences, result, _model_names(settings), wanted)
    render = _renderer(body, answer, media_type)
    estimated_bytes = estimate_bytes(sentences, result)
    if wanted.take_long:  # However small the answer is.
        estimated_bytes = max(estimated_bytes, LARGE_RESPONSE_BYTES)
    return await call.render(render, estimated_bytes, media_type)


def _vector_options(body: EmbeddingRequest) -> VectorOptions:
    return VectorOptions(
        Outputs(body.return_dense, body.return_sparse, body.return_colbert),
        body.output_dtype,
        body.colbert_pool_factor,
        body.muvera,
    )


def _renderer(
    body: EmbeddingRequest, answer: EmbeddingAnswer, media_type: str
) -> Callable[[], Iterable[Chunk]]:
    if media_type in BINARY:
        return partial(BINARY[media_type], answer)
    return partial(
        json_answer.render,
        answer,
        sparse_as_indices=body.sparse_as_indices,
        as_base64=body.encoding == "base64",
    )


def _check(body: EmbeddingRequest, settings: Settings) -> None:
    check_texts(body.sentences, "sentences", settings)
    kinds = (body.return_dense, body.return_sparse, body.return_colbert, body.muvera)
    if not any(kinds):
        raise InvalidRequestError(
            "nothing is asked for: set return_dense, return_sparse or return_colbert to true"
        )
    check_truncation(body.truncate, body.truncation_side)


def _check_format(body: EmbeddingRequest, media_type: str) -> None:
    """Raise `InvalidRequestError` for numbers that the format cannot hold."""
    if media_type == JSON and body.encoding != "base64" and body.output_dtype in _NOT_IN_JSON:
        raise InvalidRequestError(
            f"the option output_dtype is {body.output_dtype}, which JSON has no numbers for: set "
            f"encoding to base64, or ask for {', '.join(BINARY)} in Accept"
        )
    if media_type != JSON and body.encoding == "base64":
        raise InvalidRequestError(
            f"the option encoding is for JSON, and Accept asks for {media_type}: send one of them"
        )


def _model_names(settings: Settings) -> ModelNames:
    bge = public_name(settings.embedding_model)
    return ModelNames(dense=public_name(settings.dense_model), sparse=bge, colbert=bge)


_OPERATION = Operation(Dialect.NATIVE, NATIVE_EMBEDDINGS, "sentences", EmbeddingRequest, _embed)
