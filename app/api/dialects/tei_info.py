"""text-embeddings-inference: what is served, and whether it can answer."""

import os
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from app import __version__
from app.api.dialects import tei_schemas as schemas
from app.api.dialects.tei import BELOW_MODEL, MODEL_TAG, ROOT_TAG
from app.api.dialects.tei_tokens import loaded
from app.api.handler import Service, ServiceDep, get_and_head
from app.api.model_catalogue import Role, ServedModel
from app.api.openapi import BEARER, error_responses
from app.engine.loaded_models import LoadedModels
from app.errors import LoadingError, ModelNotLoadedError
from app.settings import Settings

router = APIRouter()

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


@get_and_head(router, "/info", tags=[ROOT_TAG], **_INFO)
async def info(service: ServiceDep) -> Response:
    """The model that makes dense vectors, and the limits of this service."""
    return _describe(service, service.catalogue.embedder(None))


@get_and_head(router, f"{BELOW_MODEL}/info", tags=[MODEL_TAG], **_INFO)
async def info_of_model(model: str, service: ServiceDep) -> Response:
    """One model and its kind, and the limits of this service."""
    return _describe(service, service.catalogue.find(model))


@get_and_head(router, "/ping", tags=[ROOT_TAG], **_PING)
async def ping(service: ServiceDep) -> Response:
    """200 once the models are warm, else 503."""
    return _status(service)


@get_and_head(
    router,
    f"{BELOW_MODEL}/health",
    tags=[MODEL_TAG],
    summary="Can this service answer?",
    response_class=Response,
    responses=error_responses(404, 503, model=schemas.TeiError),
)
@get_and_head(router, f"{BELOW_MODEL}/ping", include_in_schema=False)
async def ping_model(model: str, service: ServiceDep) -> Response:
    """The same, of one model."""
    service.catalogue.find(model)
    return _status(service)


def _status(service: Service) -> Response:
    status, reason = service.status
    if status == "healthy":
        return Response(status_code=200)
    return JSONResponse({"error": f"{status}: {reason}", "error_type": "Unhealthy"}, 503)


def _describe(service: Service, model: ServedModel) -> Response:
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
