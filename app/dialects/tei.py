"""text-embeddings-inference: every path, at the root and, for one model, below /models/{model}.

Reranking at the root is /rerank, where a body is this dialect's by its field `texts`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Annotated, Any

import orjson
from fastapi import Depends, Path
from pydantic import Tag
from starlette.responses import JSONResponse, Response

from app import handler
from app.answers import (
    rank_by_score,
    render_items,
    render_list,
    text_as_json,
)
from app.body import DescribedBy, discriminate_by
from app.catalogue import Role, ServedModel
from app.dialects.tei_schemas import (
    TEI,
    DenseVectors,
    EmbedSparseRequest,
    Info,
    Ranks,
    RerankTextsRequest,
    SparseVectors,
    TeiEmbedRequest,
    TeiError,
    TokenizeRequest,
    Tokens,
)
from app.routing import Router
from app.schemas import check_texts
from app.service import Service, ServiceDep
from smart_embedder import __version__
from smart_embedder import requests as records
from smart_embedder.errors import InvalidRequestError
from smart_embedder.interface import LoadedModels, Model
from smart_embedder.requests import RerankRequest
from smart_embedder.results import EmbeddingResult, RerankResult
from smart_embedder.tokens import SpecialToken, TokenSpans

_ROOT_TAG, _MODEL_TAG = TEI.name, f"{TEI.name}, one model"
_TAGS = (
    {
        "name": _ROOT_TAG,
        "description": "Of the default models. Reranking is at /rerank, told apart by `texts`.",
    },
    {"name": _MODEL_TAG, "description": "The same of one model."},
)


async def _declare_model(
    model: Annotated[str, Path(description="Any name of a model; see /v1/models.")],
) -> None:
    """Add the path's parameter to the description of operations that read it from the request."""


_OF_MODEL: dict[str, Any] = {"tags": [_MODEL_TAG], "dependencies": [Depends(_declare_model)]}
_BELOW_MODEL = "/models/{model:path}"

router = Router(TEI, TeiError, _TAGS, tags=[_ROOT_TAG])
model_router = Router(TEI, TeiError, below=("/models/",), **_OF_MODEL)
health_router = Router(TEI, TeiError, is_public=True)

_TOKENS_PER_CHUNK = 4096
# Of the answer, about: numbers of four digits and a word.
_BYTES_PER_TOKEN = 64


@router.work("/", DenseVectors, name="embed_root", summary="Embed texts")
@router.work("/embed", DenseVectors, name="embed_dense", summary="Embed texts")
@model_router.work(f"{_BELOW_MODEL}/embed", DenseVectors, name="model_embed", summary="Embed texts")
async def embed(body: TeiEmbedRequest, call: handler.Call) -> Response:
    """One dense vector for each text."""
    result = await embed_dense(body, call)
    vectors = [each.dense for each in result.embeddings]
    return await _answer(call, body.inputs, result, lambda: render_list(vectors))


async def embed_dense(body: TeiEmbedRequest, call: handler.Call) -> EmbeddingResult:
    """One dense vector for each text, of the model in the request's path or the default one."""
    request = replace(
        body.request(body.inputs),
        dimensions=body.dimensions,
        normalize_dense=body.normalize is not False,
    )
    return await handler.embed(call, request, field="inputs", model=handler.find_embedder(call))


@router.work("/embed_sparse", SparseVectors, summary="Embed texts as sparse vectors")
@model_router.work(
    f"{_BELOW_MODEL}/embed_sparse",
    SparseVectors,
    name="model_sparse",
    summary="Embed texts as sparse vectors",
)
async def embed_sparse(body: EmbedSparseRequest, call: handler.Call) -> Response:
    """The lexical weights of each text, which only models of bge-m3's kind make."""
    request = body.request(body.inputs, records.Outputs(sparse=True))
    model = handler.find_embedder(call, Role.EMBEDDER)
    result = await handler.embed(call, request, field="inputs", model=model)
    vectors = [each.sparse for each in result.embeddings if each.sparse is not None]

    def weights() -> Iterator[list[dict[str, Any]]]:
        for sparse in vectors:
            pairs = zip(sparse.indices.tolist(), sparse.values, strict=True)
            yield [{"index": index, "value": value} for index, value in pairs]

    return await _answer(call, body.inputs, result, lambda: render_list(weights()))


@model_router.work(
    f"{_BELOW_MODEL}/rerank",
    Ranks,
    name="model_rerank",
    summary="Order texts by relevance",
)
async def rerank_texts(body: RerankTextsRequest, call: handler.Call) -> Response:
    """At the root, /rerank takes the same body."""
    request = RerankRequest(
        body.query, body.texts, normalize=not body.raw_scores, truncation=body.truncation
    )
    result = await handler.rerank(call, request, _reranker_of(call), "texts")

    def ranks() -> Iterator[dict[str, Any]]:
        for index, score in rank_by_score(result.scores):
            text = {"text": text_as_json(body.texts[index])} if body.return_text else {}
            yield {"index": index, "score": score} | text

    texts = [body.query, *body.texts]
    return await _answer(call, texts, result, lambda: render_list(ranks()))


@model_router.work("/models/{model}", DenseVectors, summary="Do what the model is for")
async def ask_model(
    body: Annotated[
        Annotated[TeiEmbedRequest, Tag("inputs")] | Annotated[RerankTextsRequest, Tag("texts")],
        discriminate_by("inputs", "texts"),
        DescribedBy("inputs"),
    ],
    call: handler.Call,
) -> Response:
    """The same as /embed, or for a reranker as /rerank, of the model with that name."""
    if isinstance(body, RerankTextsRequest):
        return await rerank_texts(body, call)
    return await embed(body, call)


def _reranker_of(call: handler.Call) -> ServedModel | None:
    """The model in the request's path, or the default; `InvalidRequestError` for no reranker."""
    catalogue, name = call.service.catalogue, call.path_params.get("model")
    if name is None:
        return catalogue.reranker(None)
    model = catalogue.find(name)
    if not catalogue.reranks(model):
        raise InvalidRequestError(f"the model {model.name} is no reranker")
    return model


async def _answer(
    call: handler.Call,
    texts: list[str],
    result: EmbeddingResult | RerankResult,
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


@router.work("/tokenize", Tokens, summary="Tokenise texts")
@model_router.work(
    f"{_BELOW_MODEL}/tokenize", Tokens, name="model_tokenize", summary="Tokenise texts"
)
async def tokenize_texts(body: TokenizeRequest, call: handler.Call) -> Response:
    """The tokens that the model reads of each text, none of which is cut."""
    check_texts(body.inputs, "inputs", call.service.settings.max_sentences_per_request)
    model, answer = _model_of(call), call.context.answer

    def needed(tokens: int) -> tuple[int, str, str]:
        return (
            _BYTES_PER_TOKEN * tokens,
            f"{tokens} tokens of these texts",
            "send fewer texts or shorter ones",
        )

    def split(models: LoadedModels) -> tuple[Model, list[str], list[list[TokenSpans]], int]:
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
        spans: list[list[TokenSpans]] = [[] for _ in texts]
        tokens = 0
        for text, own in zip(texts, spans, strict=True):
            for part in tokenizer.token_spans(text):
                tokens += len(part.ids)
                answer.check(*needed(tokens))
                own.append(part)
        return tokenizer, texts, spans, tokens

    call.forget_body()
    tokenizer, texts, spans, tokens = await call.service.engine.run_tokenizer(
        split, body.inputs, client=call.context.client, model=model.name
    )
    answer.need(*needed(tokens))
    frame = tokenizer.special_tokens if body.add_special_tokens is not False else ([], [])
    return await call.render(partial(_render_tokens, texts, spans, frame))


def _model_of(call: handler.Call) -> ServedModel:
    """The model in the request's path, or the one that makes dense vectors."""
    return call.service.catalogue.find(call.path_params.get("model"))


def _loaded(model: ServedModel, models: LoadedModels) -> Model:
    """The loaded model behind one that is served."""
    found: Model = getattr(models, model.role.value)
    return found


def _render_tokens(
    texts: list[str],
    spans: list[list[TokenSpans]],
    frame: tuple[list[SpecialToken], list[SpecialToken]],
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


def _plain(text: str, parts: list[TokenSpans]) -> Iterator[list[dict[str, Any]]]:
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
    "response_model": Info,
}
_PING: dict[str, Any] = {"summary": "Can this service answer?", "response_class": Response}


@router.get_and_head("/info", **_INFO)
async def show_info(service: ServiceDep) -> Response:
    """The model that makes dense vectors, and the limits of this service."""
    return _describe_model(service, service.catalogue.find(None))


@model_router.get_and_head(f"{_BELOW_MODEL}/info", **_INFO)
async def model_info(model: str, service: ServiceDep) -> Response:
    """One model and its kind, and the limits of this service."""
    return _describe_model(service, service.catalogue.find(model))


@health_router.get_and_head("/ping", tags=[_ROOT_TAG], **_PING)
async def ping_service(service: ServiceDep) -> Response:
    """200 once the models are warm, else 503."""
    return _status(service)


@health_router.get_and_head(f"{_BELOW_MODEL}/health", tags=[_MODEL_TAG], **_PING)
@health_router.get_and_head(f"{_BELOW_MODEL}/ping", include_in_schema=False)
async def model_health(model: str, service: ServiceDep) -> Response:
    """The same, of one model."""
    service.catalogue.find(model)
    return _status(service)


def _status(service: Service) -> Response:
    status, reason = service.status
    if status == "healthy":
        return Response(status_code=200)
    return JSONResponse({"error": f"{status}: {reason}", "error_type": "Unhealthy"}, 503)


def _describe_model(service: Service, model: ServedModel) -> Response:
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
