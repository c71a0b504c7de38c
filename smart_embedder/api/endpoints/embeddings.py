"""POST /embeddings/: texts in, dense, sparse and ColBERT vectors out."""

from collections.abc import Callable, Iterable
from functools import partial

from fastapi import Request
from starlette.responses import Response

from smart_embedder.api.answers import Base64Response, EmbeddingResponse
from smart_embedder.api.context import NATIVE, NATIVE_EMBEDDINGS
from smart_embedder.api.formats import vectors as json_answer
from smart_embedder.api.formats.records import BINARY, SAFETENSORS, media_type_of
from smart_embedder.api.formats.vectors import EmbeddingAnswer
from smart_embedder.api.handler import Call, Operation, Router, ServiceDep, respond
from smart_embedder.api.openapi import BEARER, describe_body, error_responses
from smart_embedder.api.rendering import Chunk
from smart_embedder.api.schemas import EmbeddingRequest, check_texts
from smart_embedder.api.work import compute, model_names, native_work

_BYTES = {"schema": {"type": "string", "format": "binary"}}

_TAG = {"name": "embeddings", "description": "This service's own: all kinds of vectors at once."}

router = Router(groups=[_TAG], tags=[_TAG["name"]], dependencies=[BEARER])


@router.work(
    NATIVE_EMBEDDINGS.path,
    NATIVE_EMBEDDINGS,
    summary="Embed texts",
    response_model=EmbeddingResponse | Base64Response,
    responses=error_responses(400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)
    | {200: {"content": dict.fromkeys(BINARY, _BYTES)}},
    openapi_extra=describe_body(EmbeddingRequest),
)
async def create_embeddings(request: Request, service: ServiceDep) -> Response:
    """Dense, sparse and ColBERT vectors of each text, from one forward pass.

    A body with `input` is read as OpenAI's, as at /v1/embeddings.
    """
    return await respond(request, service, _OPERATION)


async def _embed(body: EmbeddingRequest, call: Call) -> Response:
    settings, sentences = call.service.settings, body.sentences
    model = call.service.catalogue.embedder(body.model) if body.model else None
    media_type = media_type_of(call.request)
    check_texts(sentences, "sentences", settings)
    models = await call.lease(model)
    work, wanted = native_work(body, model, models, media_type, [*BINARY])
    result = await compute(call, sentences, work)
    wanted.hold(result.embeddings, call.context.answer, at_once=media_type == SAFETENSORS)
    answer = EmbeddingAnswer(sentences, result, model_names(models), wanted)
    render: Callable[[], Iterable[Chunk]] = partial(
        json_answer.render,
        answer,
        sparse_as_indices=body.sparse_as_indices,
        as_base64=body.encoding == "base64",
    )
    if media_type in BINARY:
        render = partial(BINARY[media_type], answer)
    return await call.render(render, media_type)


_OPERATION = Operation(NATIVE, NATIVE_EMBEDDINGS, "sentences", EmbeddingRequest, _embed)
