"""POST /embeddings/: texts in, dense, sparse and ColBERT vectors out."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.checks import check_texts, check_truncation
from app.api.dialects import openai
from app.api.dialects.work import vectors
from app.api.handler import Call, Operation, ServiceDep, respond
from app.api.openapi import BEARER, describe_body, error_responses
from app.api.paths import NATIVE_EMBEDDINGS, Dialect
from app.api.rendering import ModelNames, estimate_bytes, render_embeddings
from app.api.schemas import EmbeddingRequest, EmbeddingResponse
from app.engine.types import Outputs
from app.errors import InvalidRequestError
from app.settings import Settings
from app.settings.model_names import public_name

router = APIRouter(tags=["embeddings"], dependencies=[BEARER])


@router.post(
    NATIVE_EMBEDDINGS.path,
    summary="Embed texts",
    response_model=EmbeddingResponse,
    responses=error_responses(400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504),
    openapi_extra=describe_body(EmbeddingRequest),
)
async def create_embeddings(request: Request, service: ServiceDep) -> Response:
    """Dense, sparse and ColBERT vectors of each text, from one forward pass.

    A body with `input` is read as OpenAI's, as at /v1/embeddings.
    """
    return await respond(request, service, _OPERATION, openai.EMBEDDINGS)


async def _embed(body: EmbeddingRequest, call: Call) -> Response:
    settings, sentences = call.service.settings, body.sentences
    _check(body, settings)
    result = await vectors(
        call,
        sentences,
        Outputs(body.return_dense, body.return_sparse, body.return_colbert),
        options=body.options,
        normalize=body.normalize_dense,
    )
    names = _model_names(settings)
    render = partial(
        render_embeddings, sentences, result, names, sparse_as_indices=body.sparse_as_indices
    )
    return await call.render(render, estimate_bytes(sentences, result))


def _check(body: EmbeddingRequest, settings: Settings) -> None:
    check_texts(body.sentences, "sentences", settings)
    if not (body.return_dense or body.return_sparse or body.return_colbert):
        raise InvalidRequestError(
            "nothing is asked for: set return_dense, return_sparse or return_colbert to true"
        )
    check_truncation(body.truncate, body.truncation_side)


def _model_names(settings: Settings) -> ModelNames:
    bge = public_name(settings.embedding_model)
    return ModelNames(dense=public_name(settings.dense_model), sparse=bge, colbert=bge)


_OPERATION = Operation(Dialect.NATIVE, NATIVE_EMBEDDINGS, "sentences", EmbeddingRequest, _embed)
