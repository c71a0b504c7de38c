"""POST /rerank: order passages by relevance, this service's own API."""

from functools import partial
from typing import Annotated

from pydantic import Tag
from starlette.responses import Response

from app import schemas
from app.answers import render_rerank
from app.body import DescribedBy, discriminate_by
from app.context import RERANK
from app.dialects import cohere, tei
from app.dialects.cohere import DocumentsRequest
from app.dialects.tei_schemas import RerankTextsRequest
from app.handler import Call, score_passages
from app.images import read_images
from app.response_schemas import RerankResponse
from app.routing import Router
from app.schemas import RerankBody
from smart_embedder.requests import FusionWeights, RerankRequest, TruncationOptions
from smart_embedder.settings import public_name

router = Router(groups=({"name": "rerank", "description": "This service's own API."},))
# The paths of Cohere, Jina and others.
documents_router = Router(cohere.COHERE, cohere.CohereError, tags=[cohere.COHERE.name])
AnyRerankBody = Annotated[
    Annotated[RerankBody, Tag("passages")]
    | Annotated[DocumentsRequest, Tag("documents")]
    | Annotated[RerankTextsRequest, Tag("texts")],
    discriminate_by("passages", "documents", "texts"),
]


@router.work(RERANK.path, RerankResponse, summary="Order passages by relevance", tags=["rerank"])
async def rerank_passages(
    body: Annotated[AnyRerankBody, DescribedBy("passages")], call: Call
) -> Response:
    """Score each passage, the best first; equal scores keep the order of the request.

    A body with `documents` is handled as at /v2/rerank, one with `texts` as at
    /models/{model}/rerank.
    """
    if isinstance(body, DocumentsRequest):
        return await cohere.rerank_documents(body, call)
    if isinstance(body, RerankTextsRequest):
        return await tei.rerank_texts(body, call)
    service, passages = call.service, read_images(body.passages, "passages")
    model = service.catalogue.reranker(body.model)
    schemas.check_passages(body.query, passages, "passages", service.settings)
    schemas.check_truncation(body.truncate, body.truncation_side)
    models = await call.lease(model)
    schemas.check_rerank_options(models, instruction=body.instruction, weights=body.weights)
    weights = body.weights or schemas.RerankWeights()
    request = RerankRequest(
        query=body.query,
        passages=passages,
        normalize=body.normalize,
        instruction=body.instruction,
        weights=FusionWeights(weights.dense, weights.sparse, weights.colbert),
        truncation=TruncationOptions(body.truncate, body.truncation_side),
    )
    call.context.if_vector_space = body.if_vector_space or call.context.if_vector_space
    result = await score_passages(call, request, model)
    name = public_name(service.settings.reranker_name) if model is None else model.name
    about = {"model_name": name, "vector_space": call.context.vector_spaces}
    return await call.render(partial(render_rerank, passages, result, about))


@documents_router.work(
    "/v1/reranking", cohere.DocumentsResponse, name="reranking_v1", include_in_schema=False
)
@documents_router.work(
    "/v1/rerank", cohere.DocumentsResponse, name="rerank_v1", summary="Order documents by relevance"
)
@documents_router.work(
    "/v2/rerank", cohere.DocumentsResponse, name="rerank_v2", summary="Order documents by relevance"
)
async def rerank_documents(
    body: Annotated[AnyRerankBody, DescribedBy("documents")], call: Call
) -> Response:
    """Score the relevance of each document to the query from 0 to 1, the best first.

    A body with `passages` is handled as at /rerank, one with `texts` as at /models/{model}/rerank.
    """
    return await rerank_passages(body, call)
