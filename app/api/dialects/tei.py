"""text-embeddings-inference: vectors, similarity and reranking, at the root and for one model.

Below /models/{model}/ every path exists again, for that model alone.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import orjson
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app import __version__
from app.api import context as paths
from app.api.catalogue import Role, ServedModel
from app.api.context import Dialect
from app.api.dialects import tei_schemas as schemas
from app.api.handler import (
    Call,
    Operation,
    Service,
    ServiceDep,
    cancel_on_disconnect,
    get_and_head,
    respond,
)
from app.api.openapi import BEARER, describe_work, error_responses
from app.api.rendering import (
    OPTIONS,
    by_falling_score,
    render_items,
    render_list,
    render_matrix,
    text_as_json,
)
from app.api.schemas import ForeignRequest, RequestModel, check_passages, check_texts
from app.api.work import Passages, classify, embed, embedder_of, rerank
from app.engine import ClassificationRequest
from app.engine.model import LoadedModels, Model
from app.engine.records import (
    ClassificationResult,
    EmbeddingResult,
    FloatArray,
    Outputs,
    RerankResult,
    SpecialToken,
    TextEmbedding,
    TokenSpans,
)
from app.engine.requests.reranking import sigmoid
from app.engine.scheduling.admission import stop_if_given_up
from app.errors import InvalidRequestError, LoadingError, ModelNotLoadedError
from app.settings import Settings

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


_TOKENS_PER_CHUNK = 4096
# Of the answer, about: numbers of four digits and a word.
_BYTES_PER_TOKEN = 64
# Of a string with other letters than ASCII's in memory.
_BYTES_PER_CHARACTER = 4
_ADVICE = "send fewer texts or shorter ones"

Result = TypeVar("Result")


def model_of(call: Call) -> ServedModel:
    """The model in the request's path, or the one that makes dense vectors."""
    name = call.request.path_params.get("model")
    catalogue = call.service.catalogue
    return catalogue.embedder(None) if name is None else catalogue.find(name)


def loaded(model: ServedModel, models: LoadedModels) -> Model:
    """The loaded model behind one that is served."""
    of_role = {
        Role.EMBEDDER: models.embedder,
        Role.DENSE: models.dense,
        Role.RERANKER: models.reranker,
    }
    found = of_role[model.role]
    assert found is not None  # noqa: S101 - what is served is loaded
    return found


async def _tokenize(body: schemas.TokenizeRequest, call: Call) -> Response:
    check_texts(body.inputs, "inputs", call.service.settings)
    model = model_of(call)
    answer = call.context.answer

    def split(models: LoadedModels) -> tuple[Model, list[str], list[list[TokenSpans]], int]:
        tokenizer = loaded(model, models)
        prompt = _prompt(tokenizer, body.prompt_name)
        texts = [prompt + text for text in body.inputs]
        spans: list[list[TokenSpans]] = [[] for _ in texts]
        tokens = 0
        for text, own in zip(texts, spans, strict=True):
            for part in tokenizer.token_spans(text):
                tokens += len(part.ids)
                answer.check(_BYTES_PER_TOKEN * tokens, *_tokens_needed(tokens))
                own.append(part)
        return tokenizer, texts, spans, tokens

    tokenizer, texts, spans, tokens = await _on_tokenizer_thread(call, split, body.inputs, model)
    answer.need(_BYTES_PER_TOKEN * tokens, *_tokens_needed(tokens))
    frame = tokenizer.special_tokens if body.add_special_tokens is not False else ([], [])
    render = partial(_render_tokens, texts, spans, frame)
    return await call.render(render)


def _tokens_needed(tokens: int) -> tuple[str, str]:
    return f"{tokens} tokens of these texts", _ADVICE


async def _on_tokenizer_thread(
    call: Call, work: Callable[[LoadedModels], Result], texts: list[str], model: ServedModel
) -> Result:
    """The result of `work` on `texts`, which is given up where the client leaves."""
    run = call.service.engine.run_tokenizer(
        work, texts, client=call.context.client, model=model.key
    )
    return await cancel_on_disconnect(call.request, run)


def _prompt(model: Model, name: str | None) -> str:
    if name is None:
        return ""
    prompts: Mapping[str, str] = getattr(model, "prompts", {})
    if name not in prompts:
        raise InvalidRequestError(
            f"the field prompt_name is unknown to {model.name}: it has "
            f"{', '.join(prompts) or 'no prompts'}"
        )
    return prompts[name]


def _render_tokens(
    texts: list[str],
    spans: list[list[TokenSpans]],
    frame: tuple[list[SpecialToken], list[SpecialToken]],
) -> Iterator[bytes]:
    before, after = (list(map(_special, tokens)) for tokens in frame)
    return render_items(
        render_items(
            (orjson.dumps(items)[1:-1],)
            for items in chain([before], _plain(text, parts), [after])
            if items
        )
        for text, parts in zip(texts, spans, strict=True)
    )


def _special(token: SpecialToken) -> dict[str, Any]:
    return {"id": token.id, "text": token.string, "special": True, "start": None, "stop": None}


def _plain(text: str, parts: list[TokenSpans]) -> Iterator[list[dict[str, Any]]]:
    pieces = (
        (tokens, slice(begin, begin + _TOKENS_PER_CHUNK))
        for tokens in parts
        for begin in range(0, len(tokens.ids), _TOKENS_PER_CHUNK)
    )
    for tokens, part in pieces:
        ids, starts, stops = (
            each[part].tolist() for each in (tokens.ids, tokens.starts, tokens.stops)
        )
        yield [
            {"id": id_, "text": text[start:stop], "special": False, "start": start, "stop": stop}
            for id_, start, stop in zip(ids, starts, stops, strict=True)
        ]


async def _decode(body: schemas.DecodeRequest, call: Call) -> Response:
    check_texts(body.ids, "ids", call.service.settings)
    model, skip = model_of(call), body.skip_special_tokens is not False
    answer = call.context.answer

    def decode(models: LoadedModels) -> tuple[list[str], int]:
        tokenizer = loaded(model, models)
        texts: list[str] = []
        size = 0
        for ids in body.ids:
            stop_if_given_up()
            texts.append(tokenizer.decode(ids, skip_special_tokens=skip))
            size += _BYTES_PER_CHARACTER * len(texts[-1])
            answer.check(size, f"{len(texts)} of these texts", _ADVICE)
        return texts, size

    texts, size = await _on_tokenizer_thread(call, decode, [], model)
    answer.need(size, "these texts", _ADVICE)
    return await call.render(partial(render_list, texts))


add_operation(
    router,
    Operation(Dialect.TEI, paths.TEI_TOKENIZE, "inputs", schemas.TokenizeRequest, _tokenize),
    schemas.Tokens,
    "The tokens that the model reads of each text, none of which is cut.",
)
add_operation(
    router,
    Operation(Dialect.TEI, paths.TEI_DECODE, "ids", schemas.DecodeRequest, _decode),
    schemas.Texts,
    "The text of each list of the model's own token ids.",
)


info_router = APIRouter()

_ONE_LABEL = ("LABEL_0",)

_INFO: dict[str, Any] = {
    "summary": "What is served",
    "response_model": schemas.Info,
    "responses": error_responses(401, 404, 503, model=schemas.TeiError),
    "dependencies": [BEARER],
}
_PING: dict[str, Any] = {
    "summary": "Can this service answer?",
    "response_class": Response,
    "responses": error_responses(503, model=schemas.TeiError),
}


@get_and_head(info_router, "/info", tags=[ROOT_TAG], **_INFO)
async def info(service: ServiceDep) -> Response:
    """The model that makes dense vectors, and the limits of this service."""
    return _describe_model(service, service.catalogue.embedder(None))


@get_and_head(info_router, f"{BELOW_MODEL}/info", tags=[MODEL_TAG], **_INFO)
async def info_of_model(model: str, service: ServiceDep) -> Response:
    """One model and its kind, and the limits of this service."""
    return _describe_model(service, service.catalogue.find(model))


@get_and_head(info_router, "/ping", tags=[ROOT_TAG], **_PING)
async def ping(service: ServiceDep) -> Response:
    """200 once the models are warm, else 503."""
    return _status(service)


@get_and_head(
    info_router,
    f"{BELOW_MODEL}/health",
    tags=[MODEL_TAG],
    summary="Can this service answer?",
    response_class=Response,
    responses=error_responses(404, 503, model=schemas.TeiError),
)
@get_and_head(info_router, f"{BELOW_MODEL}/ping", include_in_schema=False)
async def ping_model(model: str, service: ServiceDep) -> Response:
    """The same, of one model."""
    service.catalogue.find(model)
    return _status(service)


def _status(service: Service) -> Response:
    status, reason = service.status
    if status == "healthy":
        return Response(status_code=200)
    return JSONResponse({"error": f"{status}: {reason}", "error_type": "Unhealthy"}, 503)


def _describe_model(service: Service, model: ServedModel) -> Response:
    settings, models = service.settings, service.engine.loaded(model.key)
    if models is None and model.further and service.engine.models is not None:
        raise ModelNotLoadedError(
            f"the model {model.name} is not loaded now: the next request for vectors or scores of "
            "it loads it"
        )
    if models is None:
        raise LoadingError("the models are still being loaded", retry_after=5)
    return JSONResponse(
        {
            "model_id": model.name,
            "model_sha": model.revision,
            "model_dtype": models.dtype_of(loaded(model, models)),
            "served_model_name": model.name,
            "model_type": _kind(model, models),
            "max_concurrent_requests": settings.max_queue_size,
            "max_input_length": loaded(model, models).max_length,
            "max_batch_tokens": models.max_batch_tokens,
            "max_batch_requests": settings.max_requests_in_batch,
            "max_client_batch_size": settings.max_sentences_per_request,
            "auto_truncate": False,
            "tokenization_workers": _workers(settings),
            "version": __version__,
        }
    )


def _kind(model: ServedModel, models: LoadedModels) -> dict[str, Any]:
    if model.role is Role.RERANKER:
        labels = getattr(models.reranker, "labels", _ONE_LABEL)
        kind = "reranker" if len(labels) == 1 else "classifier"
        named = {str(index): label for index, label in enumerate(labels)}
        ids = {label: index for index, label in enumerate(labels)}
        return {kind: {"id2label": named, "label2id": ids}}
    embedder = models.embedder if model.role is Role.EMBEDDER else models.dense_model
    return {"embedding": {"pooling": embedder.pooling}}


def _workers(settings: Settings) -> int:
    threads = settings.tokenizer_threads
    return (os.cpu_count() or 1) if threads == "auto" else threads


async def _predict(body: schemas.PredictRequest, call: Call) -> Response:
    pairs = body.pairs
    check_passages([], pairs, "inputs", call.service.settings)
    request = ClassificationRequest(pairs, truncation=body.truncation)
    result = await classify(call, request, reranker_of(call))
    render = partial(_render, body, result)
    response = await call.render(render)
    return add_headers(response, call, request.texts, result)


def _render(body: schemas.PredictRequest, result: ClassificationResult) -> Iterator[bytes]:
    predictions = _predictions(body, result)
    if body.is_single:
        return render_list(next(predictions))
    return render_list(predictions)


def _predictions(
    body: schemas.PredictRequest, result: ClassificationResult
) -> Iterator[list[dict[str, Any]]]:
    for logits in result.logits:
        scores = logits.tolist() if body.raw_scores else probabilities(logits)
        ranked = by_falling_score(scores)
        yield [{"score": score, "label": result.labels[label]} for label, score in ranked]


def probabilities(logits: FloatArray) -> list[float]:
    """The sigmoid of one label's logit, the softmax of several."""
    if len(logits) == 1:
        return sigmoid(logits.tolist())
    powers = np.exp(logits - logits.max())
    return (powers / powers.sum()).tolist()  # type: ignore[no-any-return]


add_operation(
    router,
    Operation(Dialect.TEI, paths.TEI_PREDICT, "inputs", schemas.PredictRequest, _predict),
    schemas.Predictions,
    "The labels of each text, or pair of texts, by falling probability.",
)
