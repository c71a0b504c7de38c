"""This service's own embeddings, streams of them, and reranking."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request
from starlette.responses import Response

from smart_embedder.api import schemas
from smart_embedder.api.answers import Base64Response, EmbeddingResponse, RerankResponse
from smart_embedder.api.body import check_encoding, content_type_of, validate
from smart_embedder.api.context import EMBEDDING_STREAM, NATIVE_EMBEDDINGS, RERANK, context_of
from smart_embedder.api.formats import records, vectors
from smart_embedder.api.formats.records import ARROW, BINARY, NDJSON, WRITERS, media_type_of
from smart_embedder.api.handler import Call, ServiceDep, compute, scores, urgency_of
from smart_embedder.api.openapi import BEARER, Router, describe_stream
from smart_embedder.api.rendering import Chunk, encoding_of, render_rerank
from smart_embedder.api.schemas import EmbeddingFields, EmbeddingRequest, RerankBody
from smart_embedder.api.stream import answer as stream_answer
from smart_embedder.api.stream.arrow_lines import ArrowReader
from smart_embedder.api.stream.lines import NdjsonReader, StreamLine
from smart_embedder.engine.checks import check_embedding, check_rendering
from smart_embedder.engine.model import LoadedModels
from smart_embedder.engine.records import (
    EmbedRequest,
    FusionWeights,
    Outputs,
    RerankRequest,
    TruncationOptions,
)
from smart_embedder.engine.requests.embedding import vector_bytes
from smart_embedder.engine.space import VECTORS
from smart_embedder.errors import InvalidRequestError, UnsupportedMediaError
from smart_embedder.settings.types import public_name

BULK_URGENCY = 7
_MAX_LINES = 512
_MAX_OPTIONS = 100
_READERS: Mapping[str, Callable[[int], stream_answer.LineReader]] = {
    NDJSON: NdjsonReader,
    ARROW: ArrowReader,
    "application/ndjson": NdjsonReader,
    "application/jsonl": NdjsonReader,
    "application/x-jsonlines": NdjsonReader,
}
_GROUPS = (
    {"name": "embeddings", "description": "This service's own: all kinds of vectors at once."},
    {"name": "rerank", "description": "This service's own."},
)

router = Router(groups=_GROUPS, dependencies=[BEARER])


@router.operation(
    NATIVE_EMBEDDINGS,
    "sentences",
    EmbeddingRequest,
    NATIVE_EMBEDDINGS.path,
    tags=["embeddings"],
    **router.describe_work(
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
    model = call.service.catalogue.embedder(body.model) if body.model else None
    media_type = media_type_of(call.request)
    most = call.service.settings.max_sentences_per_request
    schemas.check_texts(body.sentences, "sentences", most)
    models = await call.lease(model)
    request = native_request(body, body.sentences, models, media_type)
    call.context.if_vector_space = body.if_vector_space or call.context.if_vector_space
    result = await compute(call, request, model)
    at_once = media_type == records.SAFETENSORS
    vectors.hold_rendering(result.embeddings, request, call.context.answer, at_once=at_once)
    answer = vectors.EmbeddingAnswer(request, result, made_by(models, request))
    render: Callable[[], Iterable[Chunk]] = partial(
        vectors.render,
        answer,
        sparse_as_indices=body.sparse_as_indices,
        as_base64=body.encoding == "base64",
    )
    if media_type in BINARY:
        render = partial(BINARY[media_type], answer)
    return await call.render(render, media_type)


def native_request(
    fields: EmbeddingFields, texts: list[str], models: LoadedModels, media_type: str
) -> EmbedRequest:
    """What these options ask for.

    Raises `InvalidRequestError` for options that contradict each other, and for a number type that
    the format does not have.
    """
    # A kind that the request leaves out is made if it can be.
    said, made = fields.model_fields_set, models.kinds
    outputs = Outputs(
        dense=fields.return_dense if "return_dense" in said else made.dense,
        sparse=fields.return_sparse if "return_sparse" in said else made.sparse,
        colbert=fields.return_colbert if "return_colbert" in said else made.colbert,
    )
    if not (outputs or fields.muvera):
        raise InvalidRequestError(
            "nothing is asked for: set return_dense, return_sparse or return_colbert to true"
        )
    schemas.check_truncation(fields.truncate, fields.truncation_side)
    request = EmbedRequest(
        texts,
        outputs,
        # Vectors with fewer dimensions always have unit length.
        normalize_dense=fields.normalize_dense or fields.dimensions is not None,
        truncation=TruncationOptions(fields.truncate, fields.truncation_side),
        prompt=fields.prompt,
        prompt_name=fields.prompt_name,
        input_type=fields.input_type,
        dimensions=fields.dimensions,
        return_tokens=fields.return_tokens,
        output_dtype=fields.output_dtype,
        colbert_pool_factor=fields.colbert_pool_factor,
        muvera=fields.muvera,
    )
    check_rendering(request)
    as_base64, is_binary = fields.encoding == "base64", media_type in BINARY
    if not (is_binary or as_base64) and fields.output_dtype in {"float16", "bfloat16"}:
        raise InvalidRequestError(
            f"the option output_dtype is {fields.output_dtype}, which JSON has no numbers for: set "
            f"encoding to base64, or ask for {', '.join(BINARY)} in Accept"
        )
    if is_binary and as_base64:
        raise InvalidRequestError(
            f"the option encoding is for JSON, and Accept asks for {media_type}: send one of them"
        )
    return request


def made_by(models: LoadedModels, request: EmbedRequest) -> dict[str, Any]:
    """The fields of an answer that tell the model and the space of each kind of vectors."""
    dense, own = models.dense_model.name, models.embedder.name
    return {
        "model_name": dense,
        "dense_model_name": dense,
        "sparse_model_name": own,
        "colbert_model_name": own,
        **origin(models, request),
    }


def origin(models: LoadedModels, request: EmbedRequest | RerankRequest) -> dict[str, Any]:
    """The space, and the precision, of each kind in an answer."""
    spaces, makers = models.spaces_of(request), models.made_by(request)
    kinds = VECTORS if isinstance(request, EmbedRequest) else tuple(spaces)
    return {
        "vector_space": {kind: str(spaces[kind]) if kind in spaces else None for kind in kinds},
        "precision": {kind: makers[kind].precision if kind in makers else None for kind in kinds},
    }


@router.work(
    EMBEDDING_STREAM.path,
    EMBEDDING_STREAM,
    tags=["embeddings"],
    summary="Embed a stream of texts",
    response_class=Response,
    responses=router.errors(400, 401, 403, 404, 408, 412, 413, 415, 422, 429, 500, 503),
    openapi_extra=describe_stream(EmbeddingFields, StreamLine, [NDJSON, ARROW], [*WRITERS]),
)
async def stream_embeddings(request: Request, service: ServiceDep) -> Response:
    """A record for each line, in order and as soon as it is ready.

    The body may be as long as it likes: it is read as fast as its vectors are computed and taken.
    A bad line is answered with an error in its place, and the rest goes on.
    """
    fields = _options(context_of(request.scope).query)
    check_encoding(request.headers)
    read_type = content_type_of(request.headers)
    if read_type not in _READERS:
        raise UnsupportedMediaError(
            f"a stream is read as {NDJSON} or {ARROW}: send one of them as Content-Type"
        )
    lines = _READERS[read_type](service.settings.max_body_bytes)
    media_type = media_type_of(request, tuple(WRITERS))
    name = service.catalogue.embedder(fields.model).name if fields.model else None
    # Only while the stream is set up: each piece leases the model by itself.
    async with service.engine.lease(name) as models:
        embedding = native_request(fields, [], models, media_type)
    check_embedding(models, embedding)
    call, urgency = Call(request, service), urgency_of(request, BULK_URGENCY)
    client = call.context.client
    embedding = replace(embedding, urgency=urgency, client=client, model=name)
    call.context.if_vector_space = fields.if_vector_space or call.context.if_vector_space
    call.require_spaces(models, embedding)
    of_token = vector_bytes(models.embedder, replace(embedding.needed, dense=False), [1])
    tokens = call.context.answer.allowed // stream_answer.PIECES // of_token
    # Nothing below keeps the models, which may be unloaded between two pieces.
    options = records.RecordOptions(
        embedding,
        made_by(models, embedding),
        (fields.dimensions or models.dense_model.dense_width, models.embedder.colbert_width),
        sparse_as_indices=fields.sparse_as_indices,
        as_base64=fields.encoding == "base64",
    )
    return stream_answer.StreamResponse(
        call,
        lines,
        stream_answer.PieceEmbedder(service, embedding, models.spaces_of(embedding)),
        embedding,
        lambda: WRITERS[media_type](replace(options, integer_ids=lines.integer_ids)),
        max_lines=min(_MAX_LINES, service.settings.max_sentences_per_request),
        size=stream_answer.PieceSize(max(1, min(models.max_batch_tokens, tokens))),
        media_type=media_type,
        encoding=encoding_of(request) if media_type == NDJSON else None,
    )


def _options(query: bytes) -> EmbeddingFields:
    """The options in the query; raises `InvalidRequestError`, as for a body."""
    try:
        items = parse_qsl(query.decode("latin-1"), True, max_num_fields=_MAX_OPTIONS)
    except ValueError:
        raise InvalidRequestError(
            f"the query holds more than {_MAX_OPTIONS} options, and there are "
            f"{len(EmbeddingFields.model_fields)}: send each once"
        ) from None
    counts = Counter(name for name, _ in items)
    twice = next((name for name in EmbeddingFields.model_fields if counts[name] > 1), None)
    if twice is not None:
        raise InvalidRequestError(f"the option {twice} is given more than once: send it once")
    # In a query, numbers and booleans are strings.
    return validate(dict(items), EmbeddingFields, strict=False)


@router.operation(
    RERANK,
    "passages",
    RerankBody,
    RERANK.path,
    shared=("/v1/rerank", "/v2/rerank"),
    tags=["rerank"],
    **router.describe_work("Order passages by relevance", RerankBody, RerankResponse, (404, 422)),
)
async def rerank(body: RerankBody, call: Call) -> Response:
    """A score for each passage, the best first; equal scores keep the order of the request.

    A body with `documents` is read as Cohere's, as at /v2/rerank; one with `texts` is read as
    text-embeddings-inference's, as at /models/{model}/rerank.
    """
    service, passages = call.service, body.passages
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
    result = await scores(call, request, model)
    name = public_name(service.settings.reranker_name) if model is None else model.name
    about = {"model_name": name} | origin(models, request)
    return await call.render(partial(render_rerank, passages, result, about))
