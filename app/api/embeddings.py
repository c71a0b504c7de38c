"""POST /embeddings/: texts in, dense, sparse and ColBERT vectors out."""

import asyncio
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.rendering import (
    LARGE_RESPONSE_FLOATS,
    JsonPieces,
    ModelNames,
    count_floats,
    render_embeddings,
)
from app.api.requests import describe_body, error_responses, read_body
from app.api.schemas import EmbeddingRequest, EmbeddingResponse
from app.api.service import Service, ServiceDep
from app.errors import EmptyInputError, InferenceTimeoutError, InvalidRequestError
from app.jobs import EmbeddingResult

router = APIRouter(tags=["embeddings"])


@router.post("/embeddings", include_in_schema=False)
@router.post(
    "/embeddings/",
    summary="Embed texts",
    response_model=EmbeddingResponse,
    responses=error_responses(400, 413, 422, 500, 503, 504),
    openapi_extra=describe_body(EmbeddingRequest),
)
async def create_embeddings(request: Request, service: ServiceDep) -> Response:
    """Dense, sparse and ColBERT vectors of each text, from one forward pass."""
    wanted = await read_body(request, EmbeddingRequest)
    _check(wanted, service.settings.max_sentences_per_request)
    result = await _embed(service, wanted)
    service.metrics.sentences.inc(len(wanted.sentences))
    return JsonPieces(await _render(service, wanted, result))


def _check(wanted: EmbeddingRequest, most_sentences: int) -> None:
    if not wanted.sentences:
        raise EmptyInputError("sentences is empty: send at least one text")
    if len(wanted.sentences) > most_sentences:
        raise InvalidRequestError(
            f"sentences holds {len(wanted.sentences)} texts; at most {most_sentences} are allowed"
        )
    if not (wanted.return_dense or wanted.return_sparse or wanted.return_colbert):
        raise InvalidRequestError("nothing is asked for: set one of the return_ fields to true")


async def _embed(service: Service, wanted: EmbeddingRequest) -> EmbeddingResult:
    seconds = service.settings.request_timeout
    try:
        async with asyncio.timeout(seconds):
            return await service.engine.embed(
                wanted.sentences,
                dense=wanted.return_dense,
                sparse=wanted.return_sparse,
                colbert=wanted.return_colbert,
            )
    except TimeoutError:
        raise InferenceTimeoutError(f"the request took longer than {seconds:g} seconds") from None


async def _render(
    service: Service, wanted: EmbeddingRequest, result: EmbeddingResult
) -> list[bytes]:
    name = service.settings.embedding_model
    render = partial(
        render_embeddings,
        wanted.sentences,
        result,
        ModelNames(dense=name, sparse=name, colbert=name),
        sparse_as_indices=wanted.sparse_as_indices,
    )
    if count_floats(result) < LARGE_RESPONSE_FLOATS:
        return render()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(service.render_threads, render)
