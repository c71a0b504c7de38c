"""POST /embeddings/: texts in, dense, sparse and ColBERT vectors out."""

from collections.abc import Callable, Iterable
from functools import partial

from starlette.responses import Response

from smart_embedder.api.answers import Base64Response, EmbeddingResponse
from smart_embedder.api.context import NATIVE_EMBEDDINGS
from smart_embedder.api.formats import vectors as json_answer
from smart_embedder.api.formats.records import BINARY, SAFETENSORS, media_type_of
from smart_embedder.api.handler import Call, Router
from smart_embedder.api.openapi import BEARER, describe_work, operation
from smart_embedder.api.rendering import Chunk
from smart_embedder.api.schemas import EmbeddingRequest, check_texts
from smart_embedder.api.work import compute, model_names, native_request

_TAG = {"name": "embeddings", "description": "This service's own: all kinds of vectors at once."}

router = Router(groups=[_TAG], tags=[_TAG["name"]], dependencies=[BEARER])


@operation(
    router,
    NATIVE_EMBEDDINGS,
    "sentences",
    EmbeddingRequest,
    NATIVE_EMBEDDINGS.path,
    **describe_work(
        "Embed texts",
        EmbeddingRequest,
        EmbeddingResponse | Base64Response,
        (404, 422),
        media_types=BINARY,
    ),
)
async def create_embeddings(body: EmbeddingRequest, call: Call) -> Response:
    """Dense, sparse and ColBERT vectors of each text, from one forward pass.

    A body with `input` is read as OpenAI's, as at /v1/embeddings.
    """
    sentences = body.sentences
    model = call.service.catalogue.embedder(body.model) if body.model else None
    media_type = media_type_of(call.request)
    check_texts(sentences, "sentences", call.service.settings)
    models = await call.lease(model)
    request = native_request(body, sentences, models, media_type, [*BINARY])
    result = await compute(call, request, model)
    at_once = media_type == SAFETENSORS
    json_answer.hold_rendering(result.embeddings, request, call.context.answer, at_once=at_once)
    answer = json_answer.EmbeddingAnswer(request, result, model_names(models))
    render: Callable[[], Iterable[Chunk]] = partial(
        json_answer.render,
        answer,
        sparse_as_indices=body.sparse_as_indices,
        as_base64=body.encoding == "base64",
    )
    if media_type in BINARY:
        render = partial(BINARY[media_type], answer)
    return await call.render(render, media_type)
