"""OpenAI's embeddings and list of models."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request
from pydantic import JsonValue
from starlette.responses import JSONResponse, Response

from app.access.api_tokens import DEFAULT_NAME, OPERATOR_NAME
from app.api.context import context_of
from app.api.dialects.fields import DTYPES, value_of
from app.api.dialects.openai_schemas import (
    OpenAIEmbeddingRequest,
    OpenAIEmbeddings,
    OpenAIError,
    OpenAIModel,
    OpenAIModels,
    VectorForm,
)
from app.api.dialects.work import embed, embedder_of
from app.api.formats.answer import TextVectors, VectorOptions, vectors_of
from app.api.handler import Call, Operation, Service, ServiceDep, get_and_head, respond
from app.api.model_catalogue import ServedModel
from app.api.openapi import BEARER, describe_work, error_responses
from app.api.paths import OPENAI_EMBEDDINGS, Dialect
from app.api.rendering import (
    OPTIONS,
    base64_of,
    render_items,
    render_matrix,
    sparse_as_json,
    truncations_as_json,
    usage_as_json,
)
from app.api.schemas import OPENAI_TEXTS
from app.engine import EmbeddingOptions
from app.engine.types import EmbeddingResult, Outputs
from app.errors import NotOperatorError, UnknownModelError
from app.vectors.quantization import QuantizedVectors, quantize

router = APIRouter(tags=["OpenAI"], dependencies=[BEARER])


@router.post(
    OPENAI_EMBEDDINGS.path,
    **describe_work(
        "Embed texts", OpenAIEmbeddingRequest, OpenAIEmbeddings, 404, error=OpenAIError
    ),
)
@router.post("/models/{model:path}/embeddings", include_in_schema=False)
@router.post("/models/{model:path}/v1/embeddings", include_in_schema=False)
async def create_embeddings(request: Request, service: ServiceDep) -> Response:
    """A dense vector of each text, of unit length. /embeddings takes the same body."""
    return await respond(request, service, EMBEDDINGS)


async def _embed(body: OpenAIEmbeddingRequest, call: Call) -> Response:
    of_path = "model" in call.request.path_params
    model = embedder_of(call) if of_path else call.service.catalogue.embedder(body.model)
    form = body.form
    wanted = _vector_options(body, form)
    result = await embed(
        call,
        body.input,
        wanted.needed,
        field="input",
        model=model,
        options=_options(body),
        normalize=value_of(body, "normalize", "normalized", "use_activation") is not False,
        allowed=OPENAI_TEXTS,
    )
    wanted.hold(result.embeddings, call.context.answer)
    render = partial(_render, result, model, wanted, form)
    return await call.render(render)


def _vector_options(body: OpenAIEmbeddingRequest, form: VectorForm) -> VectorOptions:
    outputs = Outputs(True, bool(body.return_sparse), bool(body.return_colbert))
    options = VectorOptions(outputs, form.dtype, body.colbert_pool_factor, body.muvera)
    options.check(queries=body.known_task.input_type == "query")
    return options


def _options(body: OpenAIEmbeddingRequest) -> EmbeddingOptions:
    task = body.known_task
    return EmbeddingOptions(
        body.truncation_options,
        prompt=body.prompt,
        prompt_name=body.prompt_name,
        input_type=task.input_type,
        preferred_prompts=task.prompts,
        dimensions=value_of(body, "dimensions", "output_dimension", "dimensionality"),
    )


def _render(
    result: EmbeddingResult, model: ServedModel, wanted: VectorOptions, form: VectorForm
) -> Iterator[bytes]:
    yield b'{"object":"list","data":'
    yield from render_items(
        _render_embedding(index, vectors_of(embedding, wanted), form)
        for index, embedding in enumerate(result.embeddings)
    )
    trailer: dict[str, Any] = {
        "model": model.name,
        "usage": usage_as_json(result.tokens),
    }
    if result.truncations:
        trailer["warnings"] = truncations_as_json(result, "input")
    yield b"," + orjson.dumps(trailer)[1:]


def _render_embedding(index: int, vectors: TextVectors, form: VectorForm) -> Iterator[bytes]:
    dense, colbert = vectors.dense, vectors.colbert
    yield b'{"object":"embedding","index":%d' % index
    if dense is not None:
        made = [quantize(dense.values, DTYPES[each]) for each in form.types] or [dense]
        yield b',"embedding":'
        if form.types:
            for number, (kind, each) in enumerate(zip(form.types, made, strict=True)):
                yield (b"," if number else b"{") + b'"%s":' % kind.encode()
                yield _render_vector(each, as_base64=form.as_base64 or kind == "base64")
            yield b"}"
        else:
            yield _render_vector(dense, as_base64=form.as_base64)
        # int8 and uint8 of a vector have the same one.
        scales = [each.scales for each in made if each.scales is not None]
        if scales:
            yield b',"scale":' + orjson.dumps(scales[0][()], option=OPTIONS)
    if vectors.sparse is not None:
        yield b',"sparse":'
        yield orjson.dumps(sparse_as_json(vectors.sparse, as_indices=True), option=OPTIONS)
    if colbert is not None:
        yield b',"colbert":'
        yield from render_matrix(colbert.values)
        if colbert.scales is not None:
            yield b',"colbert_scale":' + orjson.dumps(colbert.scales, option=OPTIONS)
    if vectors.muvera is not None:
        yield b',"muvera":' + orjson.dumps(vectors.muvera, option=OPTIONS)
    yield b"}"


def _render_vector(vector: QuantizedVectors, *, as_base64: bool) -> bytes:
    return base64_of(vector.values) if as_base64 else orjson.dumps(vector.values, option=OPTIONS)


EMBEDDINGS = Operation(Dialect.OPENAI, OPENAI_EMBEDDINGS, "input", OpenAIEmbeddingRequest, _embed)


@get_and_head(
    router,
    "/v1/models",
    summary="The names of the models",
    response_model=OpenAIModels,
    responses=error_responses(401, model=OpenAIError),
)
@get_and_head(router, "/models", include_in_schema=False)
async def list_models(service: ServiceDep) -> Response:
    """Hub ids, short names and aliases; every embedding model has one with `embed` in it."""
    models = service.catalogue.models
    data = [_describe(name, model, service) for model in models for name in model.names]
    return JSONResponse({"object": "list", "data": data})


@get_and_head(
    router,
    "/v1/models/{model:path}",
    summary="One of them",
    response_model=OpenAIModel,
    responses=error_responses(401, 404, model=OpenAIError),
)
async def show_model(model: str, service: ServiceDep) -> Response:
    """The model with that name."""
    return JSONResponse(_describe(model, service.catalogue.find(model), service))


_COMMAND: dict[str, Any] = {
    "response_model": OpenAIModel,
    "responses": error_responses(401, 403, 404, 503, model=OpenAIError),
}


@router.post("/v1/models/{model:path}/load", summary="Load a model of MODELS now", **_COMMAND)
async def load_model(model: str, request: Request, service: ServiceDep) -> Response:
    """Load it, unless it is there, as its first request would; for the operator's token."""
    key = _commanded(model, request, service)
    await service.engine.load(key)
    return JSONResponse(_describe(model, service.catalogue.find(model), service))


@router.post("/v1/models/{model:path}/unload", summary="Unload a model of MODELS", **_COMMAND)
async def unload_model(model: str, request: Request, service: ServiceDep) -> Response:
    """Unload it after the requests that use it; the next one loads it; for the operator's token."""
    key = _commanded(model, request, service)
    await service.engine.unload(key)
    return JSONResponse(_describe(model, service.catalogue.find(model), service))


def _commanded(name: str, request: Request, service: Service) -> str:
    """The engine's name of a model that the operator may load and unload by command.

    Without a token anybody could take models away from others; with named ones, any client.
    """
    if context_of(request.scope).token_name not in {DEFAULT_NAME, OPERATOR_NAME}:
        raise NotOperatorError(
            f"only the operator loads and unloads models: send API_TOKEN, or the token that "
            f"API_TOKENS_FILE names {OPERATOR_NAME}"
        )
    model = service.catalogue.find(name)
    if model.key is None:
        raise UnknownModelError(f"the model {model.name} is a default model, and always loaded")
    return model.key


def _describe(name: str, model: ServedModel, service: Service) -> dict[str, JsonValue]:
    (status,) = (each for each in service.engine.statuses if each.name == model.name)
    return {
        "id": name,
        "object": "model",
        "created": service.catalogue.created,
        "owned_by": "smart-embedder",
        "task": status.task,
        "state": status.state.value,
        "token_budgets": dict(status.token_budgets),
    }
