"""OpenAI's embeddings as `openai` 3.54 sends and reads them, also below the paths of Azure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BaseModel, Field, JsonValue
from pydantic.json_schema import SkipJsonSchema
from starlette.responses import Response

from app.answers import (
    OPTIONS,
    TextVectors,
    render_items,
    render_object,
    render_vectors,
    replacement_as_json,
    reserve_rendering_memory,
    sparse_as_json,
    truncation_as_json,
    usage_as_json,
    vector_as_json,
    vectors_of,
)
from app.catalogue import ServedModel
from app.context import Dialect, Endpoint, ErrorFacts
from app.dialects import fields
from app.error_responses import NO_422
from app.handler import Call, embed, find_embedder
from app.images import read_images
from app.response_schemas import SparseIndices, TruncationWarning, Usage
from app.routing import Router
from app.schemas import OPENAI_TEXTS, PROMPT_SCHEMA, ForeignRequest
from smart_embedder.errors import InvalidRequestError
from smart_embedder.requests import EmbedRequest, Outputs, TruncationOptions, check_rendering
from smart_embedder.results import EmbeddingResult
from smart_embedder.vectors import MAX_POOL_FACTOR, MuveraSide, OutputDtype, quantize

_ERROR_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def error_details(error: ErrorFacts) -> dict[str, Any]:
    """Build OpenAI's `error` object."""
    is_server_error = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    default_type = "server_error" if is_server_error else "invalid_request_error"
    pointer = error.problems[0]["pointer"] if error.problems else ""
    return {
        "message": error.message,
        "type": _ERROR_TYPES.get(error.status, default_type),
        "param": pointer.split("/")[1] if pointer else None,
        "code": error.code,
    }


def _error_body(error: ErrorFacts, _request_id: str) -> dict[str, Any]:
    """Build an error body with OpenAI's `error`, and `detail` for Voyage's clients."""
    return {"error": error_details(error), "detail": error.message}


OPENAI = Dialect("OpenAI", _error_body, NO_422)


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """The format of dense vectors: numbers of `dtype`, or an object with one vector per `types`."""

    dtype: OutputDtype
    as_base64: bool
    types: tuple[fields.EmbeddingType, ...] = ()


def _unique(
    types: fields.EmbeddingType | list[fields.EmbeddingType] | None,
) -> tuple[fields.EmbeddingType, ...]:
    listed = types if isinstance(types, list) else [types]
    return tuple(dict.fromkeys(type_ for type_ in listed if type_ is not None))


class OpenAIEmbeddingRequest(ForeignRequest):
    """Texts to embed."""

    dialect, endpoint, discriminator = OPENAI, Endpoint("/v1/embeddings"), "input"
    example: ClassVar[Mapping[str, JsonValue]] = {"input": ["What is hybrid search?"]}
    aliases = dict.fromkeys(("inputs", "texts", "text", "sentences"), "input")
    reads_token_ids = True

    input: fields.TextsOrObjects
    model: str | None = Field(None, description="Any name of an embedding model; see /v1/models.")
    encoding_format: fields.EmbeddingType | SkipJsonSchema[fields.EmbeddingTypes] | None = Field(
        None, description="base64: little-endian float32; the official clients request it."
    )
    embedding_type: fields.EmbeddingType | SkipJsonSchema[fields.EmbeddingTypes] | None = Field(
        None,
        description="Jina's name for it and for `output_dtype`; a list returns an object of types.",
    )
    output_dtype: fields.NumberType | None = Field(
        None, description="Number type with fewer bits; as in /embeddings/."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Fewer dimensions, if the model supports that."
    )
    output_dimension: int | None = Field(None, ge=1, description="The same.")
    dimensionality: int | None = Field(None, ge=1, description="The same.")
    input_type: str | None = Field(
        None,
        description="The purpose of the texts: query, document, classification and others; the "
        "model's prompt for it is put before each text, if it has one.",
    )
    task: str | None = Field(None, description="Jina's name for it.")
    task_type: str | None = Field(None, description="Nomic's name for it.")
    prompt: str | None = Field(
        None, description="Put before each text.", json_schema_extra=PROMPT_SCHEMA
    )
    prompt_name: str | None = Field(
        None, description="A prompt of the model's sentence-transformers configuration."
    )
    truncate: fields.Truncate = None
    truncation: fields.Truncation = None
    truncation_strategy: fields.Truncate = Field(None, description="Mixedbread's name for it.")
    truncation_side: fields.TruncationSide = None
    normalize: bool | None = Field(None, description="Scale to unit length, the default.")
    normalized: bool | None = Field(None, description="Jina's name for it.")
    use_activation: bool | None = Field(None, description="vLLM's name for it.")
    return_sparse: bool | None = Field(
        None, description="Also return lexical weights: an extension."
    )
    return_colbert: bool | None = Field(
        None, description="Also return one vector for each token: an extension."
    )
    colbert_pool_factor: int | None = Field(
        None, ge=2, le=MAX_POOL_FACTOR, description="As in /embeddings/: an extension."
    )
    muvera: MuveraSide | None = Field(None, description="As in /embeddings/: an extension.")
    # vLLM's.
    truncate_prompt_tokens: fields.TruncatePromptTokens = None
    add_special_tokens: Annotated[fields.Unsupported, fields.allow_only(True)] = None
    padding: Annotated[fields.Unsupported, fields.allow_only("do_not_pad")] = None
    embed_dtype: Annotated[fields.Unsupported, fields.allow_only("float32")] = None
    endianness: Annotated[fields.Unsupported, fields.allow_only("little", "native")] = None
    messages: Annotated[fields.Unsupported, fields.allow_only()] = None
    # Jina's.
    late_chunking: Annotated[fields.Unsupported, fields.allow_only(False)] = None
    return_multivector: Annotated[fields.Unsupported, fields.allow_only(False)] = None
    # NVIDIA's.
    modality: Annotated[fields.Unsupported, fields.allow_only("text")] = None
    # Nomic's.
    long_text_mode: Annotated[fields.Unsupported, fields.allow_only("truncate")] = None
    max_tokens_per_text: Annotated[fields.Unsupported, fields.allow_only()] = None
    # Several servers' name for a task in words, which becomes part of the prompt.
    instruction: Annotated[fields.Unsupported, fields.allow_only()] = None
    instruct: Annotated[fields.Unsupported, fields.allow_only()] = None

    @property
    def vector_format(self) -> VectorFormat:
        """The format of the vectors; raises `InvalidRequestError` for fields that differ."""
        formats, types = _unique(self.encoding_format), _unique(self.embedding_type)
        conflict = InvalidRequestError(
            "the fields encoding_format, embedding_type and output_dtype differ: send one of them"
        )
        if len(formats) > 1 or len(types) > 1:
            several, other = (formats, types) if len(formats) > 1 else (types, formats)
            if self.output_dtype is not None or other not in {(), ("float",), ("base64",)}:
                raise conflict
            if self.return_colbert:
                raise InvalidRequestError(
                    "the fields return_colbert and embedding_type conflict: return_colbert allows "
                    "one type"
                )
            return VectorFormat("float32", as_base64="base64" in other, types=several)
        numbers = {*types, self.output_dtype} - {None, "base64"}
        # Clients send "float" by default, even with another type in another field.
        if formats != ("float",):
            numbers |= {*formats} - {"base64"}
        if len(numbers) > 1 or {"float", "base64"} == {*formats, *types}:
            raise conflict
        type_: Any = next(iter(numbers), "float")
        return VectorFormat(fields.DTYPES[type_], as_base64="base64" in {*formats, *types})

    @property
    def truncation_options(self) -> TruncationOptions:
        """The fields about truncation as the engine's options."""
        truncate = fields.merge_aliases(self, "truncate", "truncation", "truncation_strategy")
        return fields.build_truncation(truncate, self.truncation_side)

    @property
    def merged_task(self) -> fields.Task:
        """The purpose of the texts, from three fields.

        Raises `InvalidRequestError` for an unknown value, and for fields that differ.
        """
        tasks = []
        for name in ("input_type", "task", "task_type"):
            value = getattr(self, name)
            if value is None:
                continue
            if value not in fields.TASKS:
                raise InvalidRequestError(
                    f"the field {name} is unknown: send {', '.join(fields.TASKS)}, or leave it out"
                )
            tasks.append(fields.TASKS[value])
        types = {task.input_type for task in tasks if task.input_type is not None}
        if len(types) > 1:
            raise InvalidRequestError(
                "the fields input_type, task and task_type differ: send one of them"
            )
        prompts = tuple(prompt for task in tasks for prompt in task.prompts)
        return fields.Task(next(iter(types), None), prompts)


class OpenAIItem(BaseModel):
    """The fields of one text other than its dense vector."""

    object: Literal["embedding"]
    index: int
    scale: float | None = Field(
        None, description="Multiply by it to get floats; with int8 and uint8 only."
    )
    sparse: SparseIndices | None = None
    colbert: list[list[float]] | None = None
    colbert_scale: list[float] | None = None
    muvera: list[float] | None = None


class OpenAIEmbedding(OpenAIItem):
    """The vector of one text, with unit length."""

    embedding: list[float]


class Base64Embedding(OpenAIItem):
    """The vector of one text for `encoding_format` base64."""

    embedding: str


class TypedEmbedding(OpenAIItem):
    """The vector of one text for several types: numbers or base64 of each type."""

    embedding: dict[str, Any]


class OpenAIEmbeddings(BaseModel):
    """Vectors in the order of the request."""

    object: Literal["list"]
    data: list[OpenAIEmbedding | Base64Embedding | TypedEmbedding]
    model: str
    usage: Usage
    warnings: list[TruncationWarning] | None = Field(None, description="Left out if empty.")


class OpenAIErrorDetails(BaseModel):
    """The error."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(BaseModel):
    """An error in OpenAI's form, with `detail` for Voyage's clients."""

    error: OpenAIErrorDetails
    detail: str


TAG = {
    "name": "OpenAI",
    "description": "Also below /models/{model} and Azure's /openai/deployments/{model}, for that "
    "model alone.",
}

router = Router(OPENAI, OpenAIError, [TAG], below=("/v1/", "/openai/"), tags=[TAG["name"]])


@router.work("/v1/embeddings", OpenAIEmbeddings, summary="Embed texts")
@router.work("/openai/v1/embeddings", OpenAIEmbeddings, include_in_schema=False)
@router.work(
    "/openai/deployments/{model:path}/embeddings", OpenAIEmbeddings, include_in_schema=False
)
@router.work("/models/{model:path}/embeddings", OpenAIEmbeddings, include_in_schema=False)
@router.work("/models/{model:path}/v1/embeddings", OpenAIEmbeddings, include_in_schema=False)
async def embed_input(body: OpenAIEmbeddingRequest, call: Call) -> Response:
    """Embed each text as a dense vector of unit length. /embeddings takes the same body."""
    if "model" in call.path_params:
        model = find_embedder(call)
    else:
        model = call.service.catalogue.embedder(body.model)
    if body.truncate_prompt_tokens is not None:
        models = await call.lease(model)
        fields.check_prompt_tokens(body.truncate_prompt_tokens, models.dense_model)
    vector_format, task = body.vector_format, body.merged_task
    normalize = fields.merge_aliases(body, "normalize", "normalized", "use_activation")
    request = EmbedRequest(
        read_images(body.input, "input"),
        Outputs(True, bool(body.return_sparse), bool(body.return_colbert)),
        normalize_dense=normalize is not False,
        truncation=body.truncation_options,
        prompt=body.prompt,
        prompt_name=body.prompt_name,
        input_type=task.input_type,
        preferred_prompts=task.prompts,
        dimensions=fields.merge_aliases(body, "dimensions", "output_dimension", "dimensionality"),
        output_dtype=vector_format.dtype,
        colbert_pool_factor=body.colbert_pool_factor,
        muvera=body.muvera,
    )
    check_rendering(request)
    result = await embed(call, request, field="input", model=model, allowed=OPENAI_TEXTS)
    reserve_rendering_memory(result.embeddings, request, call.context.answer)
    return await call.render(partial(_render, result, model, request, vector_format))


def _render(
    result: EmbeddingResult, model: ServedModel, request: EmbedRequest, vector_format: VectorFormat
) -> Iterator[bytes]:
    items = (
        _render_embedding(index, vectors_of(embedding, request), vector_format)
        for index, embedding in enumerate(result.embeddings)
    )
    answer: dict[str, Any] = {"object": "list", "data": render_items(items), "model": model.name}
    answer["usage"] = usage_as_json(result.tokens)
    warnings = [truncation_as_json(cut, "input") for cut in result.truncations]
    warnings += map(replacement_as_json, result.replaced)
    if warnings:
        answer["warnings"] = warnings
    return render_object(answer)


def _render_embedding(
    index: int, vectors: TextVectors, vector_format: VectorFormat
) -> Iterator[bytes]:
    item: dict[str, Any] = {"object": "embedding", "index": index}
    if (dense := vectors.dense) is not None:
        as_base64 = vector_format.as_base64
        by_type = {
            type_: quantize(dense.values, fields.DTYPES[type_]) for type_ in vector_format.types
        }
        item["embedding"] = {
            type_: vector_as_json(vector.values, as_base64=as_base64 or type_ == "base64")
            for type_, vector in by_type.items()
        } or vector_as_json(dense.values, as_base64=as_base64)
        # int8 and uint8 of a vector have the same scale.
        scales = [
            vector.scales for vector in by_type.values() or [dense] if vector.scales is not None
        ]
        if scales:
            item["scale"] = scales[0][()]
    if vectors.sparse is not None:
        item["sparse"] = sparse_as_json(vectors.sparse, as_indices=True)
    if vectors.muvera is not None:
        item["muvera"] = vectors.muvera
    yield orjson.dumps(item, option=OPTIONS)[:-1]
    if vectors.colbert is not None:
        yield b","
        yield from render_vectors("colbert", vectors.colbert)
    yield b"}"
