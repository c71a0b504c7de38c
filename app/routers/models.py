"""GET /v1/models in OpenAI's form, and commands that load and unload a model."""

from typing import Annotated, Literal

from fastapi import Request
from pydantic import BaseModel, Field, JsonValue
from starlette.responses import JSONResponse, Response

from app.catalogue import ServedModel
from app.context import DEFAULT_NAME, OPERATOR_NAME, context_of
from app.dialects import sie
from app.dialects.openai import OPENAI, TAG, OpenAIError
from app.errors import NotOperatorError, UnknownModelError
from app.routing import Router
from app.service import Service, ServiceDep

router = Router(OPENAI, OpenAIError, tags=[TAG["name"]])


class OpenAIModel(BaseModel):
    """One name of a model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    task: Annotated[Literal["embed", "rerank", "extract"], Field(description="An extension.")]
    state: Annotated[
        Literal["unloaded", "loading", "ready", "failed"],
        Field(description="Whether the model is loaded: an extension."),
    ]
    token_budgets: Annotated[
        dict[str, int],
        Field(
            description="Token budget of a forward on each device, while the model is loaded: an "
            "extension."
        ),
    ]
    vector_space: Annotated[
        dict[str, str] | None,
        Field(description="The id for each kind, while the model is loaded: an extension."),
    ]


class OpenAIModels(BaseModel):
    """Every name of every model."""

    object: Literal["list"]
    data: list[OpenAIModel]


@router.get_and_head("/v1/models", summary="List model names", response_model=OpenAIModels)
@router.get_and_head("/models", include_in_schema=False)
async def list_models(request: Request, service: ServiceDep) -> Response:
    """List hub ids, short names and aliases; an embedding model has a name with `embed` in it.

    SIE's client gets the models in SIE's form.
    """
    models = service.catalogue.models
    if sie.SDK_HEADER in request.headers:
        return JSONResponse({"models": [sie.describe_model(model, service) for model in models]})
    data = [_describe(name, model, service) for model in models for name in model.names]
    return JSONResponse({"object": "list", "data": data})


@router.get_and_head("/models/{model}", include_in_schema=False)
@router.get_and_head(
    "/v1/models/{model:path}", summary="Describe a model", response_model=OpenAIModel
)
async def show_model(model: str, request: Request, service: ServiceDep) -> Response:
    """Describe the model with this name."""
    found = service.catalogue.find(model)
    if sie.SDK_HEADER in request.headers:
        return JSONResponse(sie.describe_model(found, service))
    return JSONResponse(_describe(model, found, service))


@router.post(
    "/v1/models/{model:path}/load", summary="Load a model of MODELS now", response_model=OpenAIModel
)
async def load_model(model: str, request: Request, service: ServiceDep) -> Response:
    """Load the model now instead of at its first request; needs the operator's token."""
    key = _check_command(model, request, service)
    await service.engine.load(key)
    return JSONResponse(_describe(model, service.catalogue.find(model), service))


@router.post(
    "/v1/models/{model:path}/unload", summary="Unload a model of MODELS", response_model=OpenAIModel
)
async def unload_model(model: str, request: Request, service: ServiceDep) -> Response:
    """Unload the model once no request uses it; needs the operator's token.

    The next request for the model loads it again.
    """
    key = _check_command(model, request, service)
    await service.engine.unload(key)
    return JSONResponse(_describe(model, service.catalogue.find(model), service))


def _check_command(name: str, request: Request, service: Service) -> str:
    """Return the engine's name of a model that this client may load and unload.

    Raises `NotOperatorError` for other clients, and `UnknownModelError` for a default model.
    """
    if context_of(request.scope).token_name not in {DEFAULT_NAME, OPERATOR_NAME}:
        raise NotOperatorError(
            "only the operator may load and unload models: send API_TOKEN, or the token that "
            f"API_TOKENS_FILE names {OPERATOR_NAME}"
        )
    model = service.catalogue.find(name)
    if not model.from_models_file:
        raise UnknownModelError(f"the model {model.name} is a default model: it stays loaded")
    return model.name


def _describe(name: str, model: ServedModel, service: Service) -> dict[str, JsonValue]:
    status = service.status_of(model)
    return {
        "id": name,
        "object": "model",
        "created": service.catalogue.created,
        "owned_by": "smart-embedder",
        "task": status.task,
        "state": status.state.value,
        "token_budgets": dict(status.token_budgets),
        "vector_space": None if status.info is None else dict(status.info.vector_space),
    }
