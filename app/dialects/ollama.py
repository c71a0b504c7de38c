"""The embedding API of Ollama 0.30."""

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import Request
from pydantic import BaseModel, Field, JsonValue
from starlette.responses import JSONResponse, Response

from app.answers import render_list, render_object, text_as_json
from app.body import read_body
from app.catalogue import ServedModel
from app.context import Dialect, Endpoint, ErrorFacts
from app.dialects import fields
from app.error_responses import NO_422
from app.handler import Call, embed, time_limit
from app.routing import Router
from app.schemas import OPENAI_TEXTS, ForeignRequest
from app.service import Service, ServiceDep
from smart_embedder.errors import InvalidRequestError
from smart_embedder.requests import EmbedRequest, TruncationOptions
from smart_embedder.results import EmbeddingResult

# Clients compare it with the versions of Ollama.
_VERSION = "0.30.0"
_LATEST = ":latest"
# Stands for the architecture, whose name begins the keys of `model_info`.
_FAMILY = "embedding"
# In the body of /api/show.
_MAX_SHOW_VALUES = 64


def _error_body(error: ErrorFacts, _request_id: str) -> dict[str, Any]:
    return {"error": error.message}


OLLAMA = Dialect("Ollama", _error_body, NO_422)


class OllamaOptions(BaseModel):
    """The options of a model; only `num_ctx` changes embeddings."""

    num_ctx: int | None = Field(
        None, ge=1, description="Texts are cut to this many tokens, special tokens included."
    )


class _ModelRequest(ForeignRequest):
    dialect = OLLAMA
    example: ClassVar[dict[str, JsonValue]] = {"model": "bge-m3"}

    model: str | None = Field(
        None, description="Any name of an embedding model, also with `:latest`."
    )


class OllamaEmbedRequest(_ModelRequest):
    """Texts to embed."""

    endpoint = Endpoint("/api/embed")
    example = _ModelRequest.example | {"input": ["What is hybrid search?"]}
    aliases = dict.fromkeys(("inputs", "prompt", "texts"), "input")

    input: fields.TextsOrText
    truncate: bool | None = Field(
        None, description="Cut long texts, the default; false: a long text is an error."
    )
    dimensions: int | None = Field(
        None, ge=0, description="Fewer dimensions, if the model supports that; 0: all."
    )
    options: OllamaOptions | None = None


class OllamaPromptRequest(_ModelRequest):
    """One text to embed."""

    endpoint = Endpoint("/api/embeddings")
    example = _ModelRequest.example | {"prompt": "What is hybrid search?"}
    aliases = dict.fromkeys(("input", "text"), "prompt")

    prompt: str
    options: OllamaOptions | None = None


class OllamaEmbeddings(BaseModel):
    """Vectors in the order of the request, and times in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: Annotated[int, Field(description="Tokens.")]


class OllamaEmbedding(BaseModel):
    """The vector of one text."""

    embedding: list[float]


class OllamaError(BaseModel):
    """An error in Ollama's form."""

    error: str


_TAG = {"name": OLLAMA.name}

router = Router(OLLAMA, OllamaError, [_TAG], below=("/api/",), tags=[_TAG["name"]])


@router.work("/api/embed", OllamaEmbeddings, summary="Embed texts")
async def embed_ollama(body: OllamaEmbedRequest, call: Call) -> Response:
    """Embed each text as a dense vector of unit length."""
    model = _find(body.model, call.service)
    request = EmbedRequest(
        body.input,
        normalize_dense=True,
        truncation=await _truncation(call, model, body.options, truncate=body.truncate),
        dimensions=body.dimensions or None,
    )
    result = await embed(call, request, field="input", model=model, allowed=OPENAI_TEXTS)
    return await call.render(partial(_render, result, body.model or model.name))


def _render(result: EmbeddingResult, model: str) -> Iterator[bytes]:
    return render_object(
        {
            "model": text_as_json(model),
            "embeddings": render_list(item.dense for item in result.embeddings),
            "total_duration": round(1e9 * result.timings.total),
            # A model that had to be loaded was loaded before the measured time.
            "load_duration": 0,
            "prompt_eval_count": result.tokens,
        }
    )


@router.work("/api/embeddings", OllamaEmbedding, summary="Embed one text")
async def embed_prompt(body: OllamaPromptRequest, call: Call) -> Response:
    """Embed one text as a dense vector, which the model may leave without unit length."""
    model = _find(body.model, call.service)
    request = EmbedRequest([body.prompt], truncation=await _truncation(call, model, body.options))
    result = await embed(call, request, field="prompt", model=model)
    return await call.render(lambda: render_object({"embedding": result.embeddings[0].dense}))


def _find(name: str | None, service: Service) -> ServedModel:
    """Find the embedding model with this name, which may end with `:latest`."""
    return service.catalogue.embedder(name and name.removesuffix(_LATEST))


async def _truncation(
    call: Call, model: ServedModel, options: OllamaOptions | None, *, truncate: bool | None = None
) -> TruncationOptions:
    """Convert `truncate` and `num_ctx`, which counts special tokens, to the engine's options."""
    max_tokens = None
    if options is not None and options.num_ctx is not None:
        loaded = getattr(await call.lease(model), model.role.value)
        if options.num_ctx < loaded.max_length:
            special = sum(map(len, loaded.special_tokens))
            max_tokens = max(1, options.num_ctx - special)
    return TruncationOptions(truncate is not False, "right", max_tokens)


@router.get_and_head("/api/version", include_in_schema=False)
async def show_version() -> Response:
    """Name the version of Ollama whose API this is."""
    return JSONResponse({"version": _VERSION})


@router.get_and_head("/api/tags", include_in_schema=False)
async def list_tags(service: ServiceDep) -> Response:
    """List the names of the embedding models."""
    models = [model for model in service.catalogue.models if model.role.embeds]
    tags = [_tag(name, model, service) for model in models for name in model.names]
    return JSONResponse({"models": tags})


# Not `router.work`: it runs no model, so no metric counts it.
@router.post("/api/show", include_in_schema=False)
async def show_tag(request: Request, service: ServiceDep) -> Response:
    """Describe the model that the field `model`, formerly `name`, names."""
    async with time_limit(service.settings.request_timeout):
        value = await read_body(request, [_ModelRequest], _MAX_SHOW_VALUES, service.body_lock, [])
    sent = value if isinstance(value, dict) else {}
    name = sent.get("model") or sent.get("name")
    if not isinstance(name, str):
        raise InvalidRequestError("the field model is missing: send a name of /api/tags")
    model = _find(name, service)
    loaded = getattr(service.engine.loaded(model.name), model.role.value)
    tag = _tag(name, model, service)
    return JSONResponse(
        {
            "details": tag["details"],
            "modified_at": tag["modified_at"],
            "capabilities": ["embedding"],
            "model_info": {
                "general.architecture": _FAMILY,
                f"{_FAMILY}.context_length": loaded.max_length,
                f"{_FAMILY}.embedding_length": loaded.dense_width,
            },
        }
    )


def _tag(name: str, model: ServedModel, service: Service) -> dict[str, JsonValue]:
    tagged, info = name if ":" in name else name + _LATEST, service.status_of(model).info
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": datetime.fromtimestamp(service.catalogue.created, UTC).isoformat(),
        "size": 0,  # The service does not know the size of a model's files.
        "digest": hashlib.sha256(f"{model.name}@{model.revision}".encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "safetensors",
            "family": _FAMILY,
            "families": [_FAMILY],
            "parameter_size": "",
            "quantization_level": info.dtype if info else "",
        },
    }
