"""text-embeddings-inference: every path, at the root and, for one model, below /models/{model}.

Reranking at the root is /rerank, where a body is this dialect's by its field `texts`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import Annotated, Any

import orjson
from fastapi import Depends, Path, Request
from starlette.responses import JSONResponse, Response

from smart_embedder import __version__
from smart_embedder.api import handler
from smart_embedder.api.catalogue import Role, ServedModel
from smart_embedder.api.context import RERANK, Dialect, Endpoint, ErrorFacts, Operation, context_of
from smart_embedder.api.dialects import tei_schemas as schemas
from smart_embedder.api.openapi import BEARER, Answer, Router
from smart_embedder.api.rendering import (
    by_falling_score,
    render_items,
    render_list,
    text_as_json,
)
from smart_embedder.api.schemas import ForeignRequest, RequestModel, check_texts
from smart_embedder.engine import records
from smart_embedder.engine.model import LoadedModels, Model
from smart_embedder.engine.records import RerankRequest
from smart_embedder.engine.scheduling.job import Purpose
from smart_embedder.errors import InvalidRequestError

_ERROR_TYPES = {
    "empty_input": "Empty",
    "unauthorized": "Unauthorized",
    "rate_limited": "Overloaded",
    "queue_full": "Overloaded",
    "loading": "Unhealthy",
    "model_not_loaded": "Unhealthy",
    "model_too_large": "Unhealthy",
    "draining": "Unhealthy",
    "unhealthy": "Unhealthy",
}
_STATUSES = {
    "queue_full": 429,
    "inference_failed": 424,
    "out_of_memory": 424,
    "reranker_disabled": 424,
}


def _error_body(error: ErrorFacts, _request_id: str) -> dict[str, Any]:
    server_error = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "Backend" if server_error else "Validation"
    return {"error": error.message, "error_type": _ERROR_TYPES.get(error.code, kind)}


TEI = Dialect("text-embeddings-inference", _error_body, _STATUSES)
_ROOT_TAG, _MODEL_TAG = TEI.name, f"{TEI.name}, one model"
_TAGS = (
    {
        "name": _ROOT_TAG,
        "description": "Of the default models. Reranking is at /rerank, told apart by `texts`.",
    },
    {"name": _MODEL_TAG, "description": "The same of one model."},
)
_BELOW_MODEL = "/models/{model:path}"
_EMBED = Endpoint("/embed")

router = Router(TEI, schemas.TeiError, _TAGS, below=("/models/",))

_TOKENS_PER_CHUNK = 4096
# Of the answer, about: numbers of four digits and a word.
_BYTES_PER_TOKEN = 64


async def _declare_model(
    model: Annotated[str, Path(description="Any name of a model; see /v1/models.")],
) -> None:
    """Add the path's parameter to the description of operations that read it from the request."""


def _describe(summary: str, schema: type[RequestModel], response: Any, tag: str) -> dict[str, Any]:
    described = router.describe_work(summary, schema, response, (404, 422, 424))
    declared = [Depends(_declare_model)] if tag == _MODEL_TAG else []
    return described | {"dependencies": [BEARER, *declared], "tags": [tag]}


def _operation(
    endpoint: Endpoint,
    schema: type[ForeignRequest],
    response: Any,
    *,
    field: str = "inputs",
    at_root: bool = True,
    shared: Sequence[str] = (),
) -> Callable[[Answer], Operation]:
    """Register the function that answers a body of `schema`, whose docstring is the summary.

    Its path is below /models/{model}, and at the root unless others share it there; the paths
    `shared` are described elsewhere.
    """

    def register(answer: Answer) -> Operation:
        prefixes = {"": _ROOT_TAG} if at_root else {}
        for prefix, tag in ({_BELOW_MODEL: _MODEL_TAG} | prefixes).items():
            described = _describe(str(schema.__doc__).rstrip("."), schema, response, tag)
            paths, others = prefix + endpoint.path, shared if prefix else ()
            operation = partial(router.operation, endpoint, field, schema, paths, shared=others)
            made = operation(name="answer", **described)(answer)
        return made

    return register


_EMBED_TYPES = schemas.EmbedRequest, schemas.Vectors


@router.work("/", _EMBED, **_describe("Embed texts", *_EMBED_TYPES, _ROOT_TAG))
async def answer_at_root(request: Request) -> Response:
    """The same as /embed, for clients that know nothing but an address."""
    return await handler.respond(request)


_AS_MODEL = _describe("Do what the model is for", *_EMBED_TYPES, _MODEL_TAG)


@router.work("/models/{model}", _EMBED, **_AS_MODEL)
async def answer_as_model(model: str, request: Request, service: handler.ServiceDep) -> Response:
    """The same as /embed, or for a reranker as /rerank, of the model with that name."""
    reranks = service.catalogue.find(model).role is Role.RERANKER
    context_of(request.scope).operations = (_rerank if reranks else _embed,)
    return await handler.respond(request)


@_operation(_EMBED, *_EMBED_TYPES, shared=["/"])
async def _embed(body: schemas.EmbedRequest, call: handler.Call) -> Response:
    """One dense vector for each text."""
    result = await embed_dense(body, call)
    vectors = [each.dense for each in result.embeddings]
    return await _answer(call, body.inputs, result, lambda: render_list(vectors))


async def embed_dense(body: schemas.EmbedRequest, call: handler.Call) -> records.EmbeddingResult:
    """One dense vector for each text, of the model in the request's path or the default one."""
    request = replace(
        body.request(body.inputs),
        dimensions=body.dimensions,
        normalize_dense=body.normalize is not False,
    )
    return await handler.embed(call, request, field="inputs", model=handler.embedder_of(call))


@_operation(Endpoint("/embed_sparse"), schemas.EmbedSparseRequest, schemas.SparseVectors)
async def _embed_sparse(body: schemas.EmbedSparseRequest, call: handler.Call) -> Response:
    """The lexical weights of each text, which only models of bge-m3's kind make."""
    request = body.request(body.inputs, records.Outputs(sparse=True))
    model = handler.embedder_of(call, Role.EMBEDDER)
    result = await handler.embed(call, request, field="inputs", model=model)
    vectors = [each.sparse for each in result.embeddings if each.sparse is not None]

    def weights() -> Iterator[list[dict[str, Any]]]:
        for sparse in vectors:
            pairs = zip(sparse.indices.tolist(), sparse.values, strict=True)
            yield [{"index": index, "value": value} for index, value in pairs]

    return await _answer(call, body.inputs, result, lambda: render_list(weights()))


@_operation(
    RERANK,
    schemas.RerankTextsRequest,
    schemas.Ranks,
    field="texts",
    at_root=False,
    shared=[RERANK.path, "/v1/rerank", "/v2/rerank"],
)
async def _rerank(body: schemas.RerankTextsRequest, call: handler.Call) -> Response:
    """At the root, /rerank takes the same body."""
    request = RerankRequest(
        body.query, body.texts, normalize=not body.raw_scores, truncation=body.truncation
    )
    result = await handler.rerank(call, request, _reranker_of(call), "texts")

    def ranks() -> Iterator[dict[str, Any]]:
        for index, score in by_falling_score(result.scores):
            text = {"text": text_as_json(body.texts[index])} if body.return_text else {}
            yield {"index": index, "score": score} | text

    texts = [body.query, *body.texts]
    return await _answer(call, texts, result, lambda: render_list(ranks()))


def _reranker_of(call: handler.Call) -> ServedModel | None:
    """The model in the request's path, or the default; `InvalidRequestError` for no reranker."""
    catalogue, name = call.service.catalogue, call.request.path_params.get("model")
    if name is None:
        return catalogue.reranker(None)
    model = catalogue.find(name)
    if not catalogue.reranks(model):
        raise InvalidRequestError(f"the model {model.name} is no reranker")
    return model


async def _answer(
    call: handler.Call,
    texts: list[str],
    result: records.EmbeddingResult | records.RerankResult,
    render: Callable[[], Iterable[bytes]],
) -> Response:
    """The response with TEI's headers: what was computed, and the milliseconds of each stage."""
    models, timings = call.service.engine.loaded(), result.timings
    milliseconds = {
        "x-compute-time": timings.total,
        "x-total-time": timings.total,
        "x-tokenization-time": timings.tokenize,
        "x-queue-time": timings.queue,
        "x-inference-time": timings.inference,
    }
    response = await call.render(render)
    response.headers.update(
        {
            "x-compute-type": "gpu" if models.device.gpu_available else "cpu",
            "x-compute-characters": str(sum(map(len, texts))),
            "x-compute-tokens": str(result.tokens),
        }
        | {name: str(round(1000 * seconds)) for name, seconds in milliseconds.items()}
    )
    return response


@_operation(Endpoint("/tokenize", Purpose.TOKENIZING), schemas.TokenizeRequest, schemas.Tokens)
async def _tokenize(body: schemas.TokenizeRequest, call: handler.Call) -> Response:
    """The tokens that the model reads of each text, none of which is cut."""
    check_texts(body.inputs, "inputs", call.service.settings.max_sentences_per_request)
    model, answer = _model_of(call), call.context.answer

    def needed(tokens: int) -> tuple[int, str, str]:
        return (
            _BYTES_PER_TOKEN * tokens,
            f"{tokens} tokens of these texts",
            "send fewer texts or shorter ones",
        )

    def split(models: LoadedModels) -> tuple[Model, list[str], list[list[records.TokenSpans]], int]:
        tokenizer = _loaded(model, models)
        prompt = ""
        if body.prompt_name is not None:
            prompts: Mapping[str, str] = getattr(tokenizer, "prompts", {})
            if body.prompt_name not in prompts:
                raise InvalidRequestError(
                    f"the field prompt_name is unknown to {tokenizer.name}: it has "
                    f"{', '.join(prompts) or 'no prompts'}"
                )
            prompt = prompts[body.prompt_name]
        texts = [prompt + text for text in body.inputs]
        spans: list[list[records.TokenSpans]] = [[] for _ in texts]
        tokens = 0
        for text, own in zip(texts, spans, strict=True):
            for part in tokenizer.token_spans(text):
                tokens += len(part.ids)
                answer.check(*needed(tokens))
                own.append(part)
        return tokenizer, texts, spans, tokens

    tokenizer, texts, spans, tokens = await call.service.engine.run_tokenizer(
        split, body.inputs, client=call.context.client, model=model.name
    )
    answer.need(*needed(tokens))
    frame = tokenizer.special_tokens if body.add_special_tokens is not False else ([], [])
    return await call.render(partial(_render_tokens, texts, spans, frame))


def _model_of(call: handler.Call) -> ServedModel:
    """The model in the request's path, or the one that makes dense vectors."""
    return call.service.catalogue.find(call.request.path_params.get("model"))


def _loaded(model: ServedModel, models: LoadedModels) -> Model:
    """The loaded model behind one that is served."""
    found: Model = getattr(models, model.role.value)
    return found


def _render_tokens(
    texts: list[str],
    spans: list[list[records.TokenSpans]],
    frame: tuple[list[records.SpecialToken], list[records.SpecialToken]],
) -> Iterator[bytes]:
    before, after = (
        [
            {"id": each.id, "text": each.string, "special": True, "start": None, "stop": None}
            for each in tokens
        ]
        for tokens in frame
    )
    return render_items(
        render_items(
            (orjson.dumps(items)[1:-1],)
            for items in chain([before], _plain(text, parts), [after])
            if items
        )
        for text, parts in zip(texts, spans, strict=True)
    )


def _plain(text: str, parts: list[records.TokenSpans]) -> Iterator[list[dict[str, Any]]]:
    """The tokens of a text that are not special, in pieces."""
    for tokens in parts:
        for begin in range(0, len(tokens.ids), _TOKENS_PER_CHUNK):
            ids, starts, stops = (
                each[begin : begin + _TOKENS_PER_CHUNK].tolist()
                for each in (tokens.ids, tokens.starts, tokens.stops)
            )
            yield [
                {"id": id_, "text": text[at:stop], "special": False, "start": at, "stop": stop}
                for id_, at, stop in zip(ids, starts, stops, strict=True)
            ]


_INFO: dict[str, Any] = {
    "summary": "What is served",
    "response_model": schemas.Info,
    "responses": router.errors(401, 404, 503),
    "dependencies": [BEARER],
}
_PING: dict[str, Any] = {"summary": "Can this service answer?", "response_class": Response}


@router.get_and_head("/info", tags=[_ROOT_TAG], **_INFO)
async def info(service: handler.ServiceDep) -> Response:
    """The model that makes dense vectors, and the limits of this service."""
    return _describe_model(service, service.catalogue.find(None))


@router.get_and_head(f"{_BELOW_MODEL}/info", tags=[_MODEL_TAG], **_INFO)
async def info_of_model(model: str, service: handler.ServiceDep) -> Response:
    """One model and its kind, and the limits of this service."""
    return _describe_model(service, service.catalogue.find(model))


@router.health_check("/ping", tags=[_ROOT_TAG], responses=router.errors(503), **_PING)
async def ping(service: handler.ServiceDep) -> Response:
    """200 once the models are warm, else 503."""
    return _status(service)


@router.health_check(
    f"{_BELOW_MODEL}/health", tags=[_MODEL_TAG], responses=router.errors(404, 503), **_PING
)
@router.health_check(f"{_BELOW_MODEL}/ping", include_in_schema=False)
async def ping_model(model: str, service: handler.ServiceDep) -> Response:
    """The same, of one model."""
    service.catalogue.find(model)
    return _status(service)


def _status(service: handler.Service) -> Response:
    status, reason = service.status
    if status == "healthy":
        return Response(status_code=200)
    return JSONResponse({"error": f"{status}: {reason}", "error_type": "Unhealthy"}, 503)


def _describe_model(service: handler.Service, model: ServedModel) -> Response:
    settings, models = service.settings, service.engine.loaded(model.name)
    loaded, threads = _loaded(model, models), settings.tokenizer_threads
    model_type: dict[str, Any]
    if model.role is Role.RERANKER:
        labels = getattr(loaded, "labels", ("LABEL_0",))
        named = {str(index): label for index, label in enumerate(labels)}
        ids = {label: index for index, label in enumerate(labels)}
        model_type = {"reranker": {"id2label": named, "label2id": ids}}
    else:
        embedder = models.embedder if model.role is Role.EMBEDDER else models.dense_model
        model_type = {"embedding": {"pooling": embedder.pooling}}
    return JSONResponse(
        {
            "model_id": model.name,
            "model_sha": model.revision,
            "model_dtype": models.dtype_of(loaded),
            "served_model_name": model.name,
            "model_type": model_type,
            "max_concurrent_requests": settings.max_queue_size,
            "max_input_length": loaded.max_length,
            "max_batch_tokens": min(service.status_of(model).token_budgets.values()),
            "max_batch_requests": settings.max_requests_in_batch,
            "max_client_batch_size": settings.max_sentences_per_request,
            "auto_truncate": False,
            "tokenization_workers": (os.cpu_count() or 1) if threads == "auto" else threads,
            "version": __version__,
            "vector_space": {kind: str(space) for kind, space in loaded.spaces.items()},
        }
    )
