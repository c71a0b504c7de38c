"""text-embeddings-inference: vectors, similarity and reranking, at the root and for one model.

Below /models/{model}/ every path exists again, for that model alone.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api import paths
from app.api.dialects import tei_schemas as schemas
from app.api.dialects.work import Passages, embed, embedder_of, rerank
from app.api.handler import Call, Operation, ServiceDep, respond
from app.api.model_catalogue import Role, ServedModel
from app.api.openapi import BEARER, describe_work
from app.api.paths import Dialect
from app.api.rendering import (
    OPTIONS,
    by_falling_score,
    render_items,
    render_list,
    render_matrix,
    text_as_json,
)
from app.api.schemas import ForeignRequest, RequestModel
from app.engine.types import (
    ClassificationResult,
    EmbeddingResult,
    Outputs,
    RerankResult,
    TextEmbedding,
)
from app.errors import InvalidRequestError

router = APIRouter(dependencies=[BEARER])

ROOT_TAG, MODEL_TAG = "text-embeddings-inference", "text-embeddings-inference, one model"
BELOW_MODEL = "/models/{model:path}"

Render = Callable[[TextEmbedding], Iterator[bytes]]


def _describe(summary: str, schema: type[RequestModel], response: Any) -> dict[str, Any]:
    return describe_work(summary, schema, response, 404, 422, 424, error=schemas.TeiError)


def add_operation(
    router: APIRouter, operation: Operation, response: Any, description: str, *, root: bool = True
) -> None:
    """Answer an operation below /models/{model}, and at the root unless its path is shared."""

    async def answer(request: Request, service: ServiceDep) -> Response:
        return await respond(request, service, operation)

    prefixes = {BELOW_MODEL: MODEL_TAG} | ({"": ROOT_TAG} if root else {})
    for prefix, tag in prefixes.items():
        router.add_api_route(
            prefix + operation.endpoint.path,
            answer,
            methods=["POST"],
            tags=[tag],
            description=description,
            **_describe(str(operation.schema.__doc__).rstrip("."), operation.schema, response),
        )


async def _embed(body: schemas.EmbedRequest, call: Call) -> Response:
    return await _answer(call, body.inputs, await embed_dense(body, call), _render_dense)


async def embed_dense(body: schemas.EmbedRequest, call: Call) -> EmbeddingResult:
    """One dense vector for each text, of the model in the request's path or the default one."""
    return await embed(
        call,
        body.inputs,
        Outputs(dense=True),
        field="inputs",
        model=embedder_of(call),
        options=body.options(body.dimensions),
        normalize=body.normalize is not False,
    )


def _render_dense(embedding: TextEmbedding) -> Iterator[bytes]:
    yield orjson.dumps(embedding.dense, option=OPTIONS)


async def _embed_all(body: schemas.EmbedTokensRequest, call: Call) -> Response:
    outputs, model = Outputs(states=True), embedder_of(call)
    result = await embed(
        call, body.inputs, outputs, field="inputs", model=model, options=body.options()
    )
    return await _answer(call, body.inputs, result, _render_states)


def _render_states(embedding: TextEmbedding) -> Iterator[bytes]:
    return render_matrix(embedding.states)


async def _embed_sparse(body: schemas.EmbedTokensRequest, call: Call) -> Response:
    outputs, model = Outputs(sparse=True), embedder_of(call, Role.EMBEDDER)
    result = await embed(
        call, body.inputs, outputs, field="inputs", model=model, options=body.options()
    )
    return await _answer(call, body.inputs, result, _render_sparse)


def _render_sparse(embedding: TextEmbedding) -> Iterator[bytes]:
    sparse = embedding.sparse
    assert sparse is not None  # noqa: S101 - it was asked for
    pairs = zip(sparse.indices.tolist(), sparse.values, strict=True)
    weights = [{"index": index, "value": value} for index, value in pairs]
    yield orjson.dumps(weights, option=OPTIONS)


async def _similarity(body: schemas.SimilarityRequest, call: Call) -> Response:
    source, sentences = body.inputs.source_sentence, body.inputs.sentences
    parameters = body.parameters or schemas.SimilarityParameters()
    texts = [source, *sentences]
    result = await embed(
        call,
        texts if sentences else [],
        Outputs(dense=True),
        field="inputs",
        model=embedder_of(call),
        options=parameters.options(),
    )
    response = await call.render(partial(_render_cosines, result))
    return add_headers(response, call, texts, result)


def _render_cosines(result: EmbeddingResult) -> list[bytes]:
    vectors = np.array([each.dense for each in result.embeddings], dtype=np.float32)
    return [orjson.dumps(vectors[1:] @ vectors[0], option=OPTIONS)]


async def _rerank(body: schemas.RerankTextsRequest, call: Call) -> Response:
    passages = Passages(body.query, body.texts, "texts", body.truncation)
    result = await rerank(call, passages, reranker_of(call), raw=bool(body.raw_scores))
    response = await call.render(lambda: render_list(_ranks(body, result)))
    return add_headers(response, call, [body.query, *body.texts], result)


def reranker_of(call: Call) -> ServedModel | None:
    """The model in the request's path, or the default; `InvalidRequestError` for no reranker."""
    catalogue, name = call.service.catalogue, call.request.path_params.get("model")
    if name is None:
        return catalogue.reranker(None)
    model = catalogue.find(name)
    if not catalogue.reranks(model):
        raise InvalidRequestError(f"the model {model.name} is no reranker")
    return model


def _ranks(body: schemas.RerankTextsRequest, result: RerankResult) -> Iterator[dict[str, Any]]:
    for index, score in by_falling_score(result.scores):
        item: dict[str, Any] = {"index": index, "score": score}
        if body.return_text:
            item["text"] = text_as_json(body.texts[index])
        yield item


async def _answer(
    call: Call, texts: list[str], result: EmbeddingResult, render: Render
) -> Response:
    """The response: a list of the vectors of each text as `render` renders them."""
    response = await call.render(lambda: render_items(map(render, result.embeddings)))
    return add_headers(response, call, texts, result)


def add_headers(
    response: Response,
    call: Call,
    texts: list[str],
    result: EmbeddingResult | RerankResult | ClassificationResult,
) -> Response:
    """TEI's headers: what was computed, and how many milliseconds each stage took."""
    models = call.service.engine.models
    on_gpu = models is not None and models.device.gpu_available
    timings = result.timings
    milliseconds = {
        "x-compute-time": timings.total,
        "x-total-time": timings.total,
        "x-tokenization-time": timings.tokenize,
        "x-queue-time": timings.queue,
        "x-inference-time": timings.inference,
    }
    response.headers.update(
        {
            "x-compute-type": "gpu" if on_gpu else "cpu",
            "x-compute-characters": str(sum(map(len, texts))),
            "x-compute-tokens": str(result.tokens),
        }
        | {name: str(round(1000 * seconds)) for name, seconds in milliseconds.items()}
    )
    return response


def _operation(endpoint: paths.Endpoint, schema: type[ForeignRequest], answer: Any) -> Operation:
    return Operation(Dialect.TEI, endpoint, "inputs", schema, answer)


RERANK = Operation(Dialect.TEI, paths.RERANK, "texts", schemas.RerankTextsRequest, _rerank)

_EMBED_TYPES = schemas.EmbedRequest, schemas.Vectors
_EMBED = _operation(paths.TEI_EMBED, schemas.EmbedRequest, _embed)


@router.post("/", tags=[ROOT_TAG], **_describe("Embed texts", *_EMBED_TYPES))
async def answer_at_root(request: Request, service: ServiceDep) -> Response:
    """The same as /embed, for clients that know nothing but an address."""
    return await respond(request, service, _EMBED)


@router.post(
    "/models/{model}", tags=[MODEL_TAG], **_describe("Do what the model is for", *_EMBED_TYPES)
)
async def answer_as_model(model: str, request: Request, service: ServiceDep) -> Response:
    """The same as /embed, or for a reranker as /rerank, of the model with that name."""
    reranks = service.catalogue.find(model).role is Role.RERANKER
    return await respond(request, service, RERANK if reranks else _EMBED)


add_operation(
    router,
    _EMBED,
    schemas.Vectors,
    "One dense vector for each text.",
)
add_operation(
    router,
    _operation(paths.TEI_EMBED_ALL, schemas.EmbedTokensRequest, _embed_all),
    schemas.TokenVectors,
    "The last hidden state of every token, those of special tokens included.",
)
add_operation(
    router,
    _operation(paths.TEI_EMBED_SPARSE, schemas.EmbedTokensRequest, _embed_sparse),
    schemas.SparseVectors,
    "The lexical weights of each text, which only models of bge-m3's kind make.",
)
add_operation(
    router,
    _operation(paths.TEI_SIMILARITY, schemas.SimilarityRequest, _similarity),
    schemas.Similarities,
    "The cosine of each sentence's dense vector with that of the source sentence.",
)
add_operation(
    router, RERANK, schemas.Ranks, "At the root, /rerank takes the same body.", root=False
)
