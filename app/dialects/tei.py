"""The API of text-embeddings-inference 1.9, at the root and, for one model, below /models/{model}.

At the root, /rerank recognises bodies of this API by their field `texts`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Annotated, Any

import orjson
from pydantic import Tag
from starlette.responses import JSONResponse, Response

from app import handler
from app.answers import (
    ranked_scores,
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
from app.routing import DECLARE_MODEL, Router
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
        "description": "The default models. To rerank, send `texts` to /rerank.",
    },
    {"name": _MODEL_TAG, "description": "The same for one model."},
)


_MODEL_ROUTES: dict[str, Any] = {"tags": [_MODEL_TAG], "dependencies": [DECLARE_MODEL]}
_MODEL_PATH = "/models/{model:path}"

router = Router(TEI, TeiError, _TAGS, tags=[_ROOT_TAG])
model_router = Router(TEI, TeiError, below=("/models/",), **_MODEL_ROUTES)
health_router = Router(TEI, TeiError, is_public=True)

_TOKENS_PER_CHUNK = 4096
# The approximate size in the response: numbers of four digits and a word.
_BYTES_PER_TOKEN = 64


@router.work("/", DenseVectors, name="embed_root", summary="Embed texts")
@router.work("/embed", DenseVectors, name="embed_dense", summary="Embed texts")
@model_router.work(f"{_MODEL_PATH}/embed", DenseVectors, name="model_embed", summary="Embed texts")
async def embed(body: TeiEmbedRequest, call: handler.Call) -> Response:
    """Embed each text as one dense vector."""
    result = await compute_dense(body, call)
    vectors = [item.dense for item in result.embeddings]
    return await _respond(call, body.inputs, result, lambda: render_list(vectors))


async def compute_dense(body: TeiEmbedRequest, call: handler.Call) -> EmbeddingResult:
    """Compute one dense vector for each text, by the model in the path or the default model."""
    request = replace(
        body.build_request(),
        dimensions=body.dimensions,
        normalize_dense=body.normalize is not False,
    )
    return await handler.embed(call, request, field="inputs", model=handler.find_embedder(call))


@router.work("/embed_sparse", SparseVectors, summary="Embed texts as sparse vectors")
@model_router.work(
    f"{_MODEL_PATH}/embed_sparse",
    SparseVectors,
    name="model_sparse",
    summary="Embed texts as sparse vectors",
)
async def embed_sparse(body: EmbedSparseRequest, call: handler.Call) -> Response:
    """Compute the lexical weights of each text, for models such as bge-m3."""
    request = body.build_request(records.Outputs(sparse=True))
    model = handler.find_embedder(call, Role.EMBEDDER)
    result = await handler.embed(call, request, field="inputs", model=model)
    vectors = [item.sparse for item in result.embeddings if item.sparse is not None]

    def weights() -> Iterator[list[dict[str, Any]]]:
        for sparse in vectors:
            pairs = zip(sparse.indices.tolist(), sparse.values, strict=True)
            yield [{"index": index, "value": value} for index, value in pairs]

    return await _respond(call, body.inputs, result, lambda: render_list(weights()))


@model_router.work(
    f"{_MODEL_PATH}/rerank",
    Ranks,
    name="model_rerank",
    summary="Order texts by relevance",
)
async def rerank_texts(body: RerankTextsRequest, call: handler.Call) -> Response:
    """Order texts by their relevance to the query. At the root, /rerank takes the same body."""
    request = RerankRequest(
        body.query, body.texts, normalize=not body.raw_scores, truncation=body.truncation
    )
    result = await handler.rerank(call, request, _reranker_of(call), "texts")

    def ranks() -> Iterator[dict[str, Any]]:
        for index, score in ranked_scores(result):
            text = {"text": text_as_json(body.texts[index])} if body.return_text else {}
            yield {"index": index, "score": score} | text

    texts = [body.query, *body.texts]
    return await _respond(call, texts, result, lambda: render_list(ranks()))


@model_router.work("/models/{model}", DenseVectors, summary="Embed or rerank texts")
async def ask_model(
    body: Annotated[
        Annotated[TeiEmbedRequest, Tag("inputs")] | Annotated[RerankTextsRequest, Tag("texts")],
        discriminate_by("inputs", "texts"),
        DescribedBy("inputs"),
    ],
    call: handler.Call,
) -> Response:
    """Embed `inputs` as /embed does, or rerank `texts` as /rerank does."""
    if isinstance(body, RerankTextsRequest):
        return await rerank_texts(body, call)
    return await embed(body, call)


def _reranker_of(call: handler.Call) -> ServedModel | None:
    """Return the model in the path, or the default; raise `InvalidRequestError` for an embedder."""
    catalogue, name = call.service.catalogue, call.path_params.get("model")
    if name is None:
        return catalogue.reranker(None)
    model = catalogue.find(name)
    if not catalogue.reranks(model):
        raise InvalidRequestError(f"the model {model.name} is no reranker")
    return model


async def _respond(
    call: handler.Call,
    texts: list[str],
    result: EmbeddingResult | RerankResult,
    render: Callable[[], Iterable[bytes]],
) -> Response:
    """Render a response with TEI's headers: its size, and the milliseconds of each stage."""
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


@router.work("/tokenize", Tokens, summary="Tokenize texts")
@model_router.work(
    f"{_MODEL_PATH}/tokenize", Tokens, name="model_tokenize", summary="Tokenize texts"
)
async def tokenize_texts(body: TokenizeRequest, call: handler.Call) -> Response:
    """Tokenize each text with the model's tokenizer; no text is truncated."""
    check_texts(body.inputs, "inputs", call.service.settings.max_sentences_per_request)
    model = call.service.catalogue.find(call.path_params.get("model"))
    answer = call.context.answer

    def memory_of(tokens: int) -> tuple[int, str, str]:
        return (
            _BYTES_PER_TOKEN * tokens,
            f"{tokens} tokens of these texts",
            "send fewer texts or shorter ones",
        )

    def tokenize(models: LoadedModels) -> tuple[Model, list[str], list[list[TokenSpans]], int]:
        tokenizer = _get_loaded(model, models)
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
        for text, text_spans in zip(texts, spans, strict=True):
            for part in tokenizer.token_spans(text):
                tokens += len(part.ids)
                answer.check(*memory_of(tokens))
                text_spans.append(part)
        return tokenizer, texts, spans, tokens

    call.forget_body()
    tokenizer, texts, spans, tokens = await call.service.engine.run_tokenizer(
        tokenize, body.inputs, client=call.context.client, model=model.name
    )
    answer.reserve(*memory_of(tokens))
    special = tokenizer.special_tokens if body.add_special_tokens is not False else ([], [])
    return await call.render(partial(_render_tokens, texts, spans, special))


def _get_loaded(model: ServedModel, models: LoadedModels) -> Model:
    """Return the loaded model that serves the role of `model`."""
    loaded: Model = getattr(models, model.role.value)
    return loaded


def _render_tokens(
    texts: list[str],
    spans: list[list[TokenSpans]],
    special: tuple[list[SpecialToken], list[SpecialToken]],
) -> Iterator[bytes]:
    """Render the tokens of each text between the special tokens before and after it."""
    before, after = (
        [
            {"id": token.id, "text": token.string, "special": True, "start": None, "stop": None}
            for token in tokens
        ]
        for tokens in special
    )
    return render_items(
        render_items(
            (orjson.dumps(items)[1:-1],)
            for items in chain([before], _plain_tokens(text, parts), [after])
            if items
        )
        for text, parts in zip(texts, spans, strict=True)
    )


def _plain_tokens(text: str, parts: list[TokenSpans]) -> Iterator[list[dict[str, Any]]]:
    """Yield the tokens of a text that are not special, in chunks."""
    for tokens in parts:
        for first in range(0, len(tokens.ids), _TOKENS_PER_CHUNK):
            ids, starts, stops = (
                array[first : first + _TOKENS_PER_CHUNK].tolist()
                for array in (tokens.ids, tokens.starts, tokens.stops)
            )
            yield [
                {
                    "id": id_,
                    "text": text[start:stop],
                    "special": False,
                    "start": start,
                    "stop": stop,
                }
                for id_, start, stop in zip(ids, starts, stops, strict=True)
            ]


_INFO: dict[str, Any] = {"summary": "Model and limits", "response_model": Info}
_PING: dict[str, Any] = {"summary": "Is the service ready?", "response_class": Response}


@router.get_and_head("/info", **_INFO)
async def show_info(service: ServiceDep) -> Response:
    """Describe the default embedding model and the limits of this service."""
    return _describe_model(service, service.catalogue.find(None))


@model_router.get_and_head(f"{_MODEL_PATH}/info", **_INFO)
async def model_info(model: str, service: ServiceDep) -> Response:
    """Describe one model and the limits of this service."""
    return _describe_model(service, service.catalogue.find(model))


@health_router.get_and_head("/ping", tags=[_ROOT_TAG], **_PING)
async def ping_service(service: ServiceDep) -> Response:
    """Return 200 once the models are warm, else 503."""
    return _respond_status(service)


@health_router.get_and_head(f"{_MODEL_PATH}/health", tags=[_MODEL_TAG], **_PING)
@health_router.get_and_head(f"{_MODEL_PATH}/ping", include_in_schema=False)
async def model_health(model: str, service: ServiceDep) -> Response:
    """Return 200 once the models are warm, else 503; 404 for an unknown model."""
    service.catalogue.find(model)
    return _respond_status(service)


def _respond_status(service: Service) -> Response:
    status, reason = service.status
    if status == "healthy":
        return Response(status_code=200)
    return JSONResponse({"error": f"{status}: {reason}", "error_type": "Unhealthy"}, 503)


def _describe_model(service: Service, model: ServedModel) -> Response:
    settings, models = service.settings, service.engine.loaded(model.name)
    loaded, threads = _get_loaded(model, models), settings.tokenizer_threads
    model_type: dict[str, Any]
    if not model.role.embeds:
        labels = getattr(loaded, "labels", ("LABEL_0",))
        named = {str(index): label for index, label in enumerate(labels)}
        ids = {label: index for index, label in enumerate(labels)}
        kind = "reranker" if model.role is Role.RERANKER else "classifier"
        model_type = {kind: {"id2label": named, "label2id": ids}}
    else:
        embedder = models.embedder if model.role is Role.EMBEDDER else models.dense_model
        model_type = {"embedding": {"pooling": embedder.pooling}}
    return JSONResponse(
        {
            "model_id": model.name,
            "model_sha": model.revision,
            "model_dtype": models.get_dtype(loaded),
            "served_model_name": model.name,
            "model_type": model_type,
            "max_concurrent_requests": settings.max_queue_size,
            "max_input_length": loaded.max_length,
            "max_batch_tokens": min(service.status_of(model).token_budgets.values()),
            "max_batch_requests": settings.max_requests_in_batch,
            "max_client_batch_size": settings.max_sentences_per_request,
            "auto_truncate": True,
            "tokenization_workers": (os.cpu_count() or 1) if threads == "auto" else threads,
            "version": __version__,
            "vector_space": {kind: str(space) for kind, space in loaded.spaces.items()},
        }
    )
