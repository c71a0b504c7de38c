"""OpenAI's embeddings and list of models."""

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
from app.context import (
    Dialect,
    Endpoint,
    ErrorFacts,
)
from app.dialects import fields
from app.error_responses import NO_422
from app.handler import Call, embed, find_embedder
from app.response_schemas import (
    SparseIndices,
    TruncationWarning,
    Usage,
)
from app.routing import Router
from app.schemas import OPENAI_TEXTS, PROMPT_SCHEMA, ForeignRequest
from smart_embedder.errors import InvalidRequestError
from smart_embedder.requests import (
    EmbedRequest,
    Outputs,
    TruncationOptions,
    check_rendering,
)
from smart_embedder.results import EmbeddingResult
from smart_embedder.vectors import (
    MAX_POOL_FACTOR,
    MuveraSide,
    OutputDtype,
    quantize,
)

_ERROR_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def error_details(error: ErrorFacts) -> dict[str, Any]:
    """OpenAI's `error`."""
    server_error = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "server_error" if server_error else "invalid_request_error"
    pointer = error.problems[0]["pointer"] if error.problems else ""
    return {
        "message": error.message,
        "type": _ERROR_TYPES.get(error.status, kind),
        "param": pointer.split("/")[1] if pointer else None,
        "code": error.code,
    }


def _error_body(error: ErrorFacts, _request_id: str) -> dict[str, Any]:
    """OpenAI's `error`, and beside it the sentence where Voyage's clients read it."""
    return {"error": error_details(error), "detail": error.message}


OPENAI = Dialect("OpenAI", _error_body, NO_422)


@dataclass(frozen=True, slots=True)
class VectorForm:
    """How vectors are written: as `dtype`, or, with `types`, as an object with each of these."""

    dtype: OutputDtype
    as_base64: bool
    types: tuple[fields.EmbeddingType, ...] = ()


def _unique(
    types: fields.EmbeddingType | list[fields.EmbeddingType] | None,
) -> tuple[fields.EmbeddingType, ...]:
    listed = types if isinstance(types, list) else [types]
    return tuple(dict.fromkeys(each for each in listed if each is not None))


class OpenAIEmbeddingRequest(ForeignRequest):
    """Texts to embed."""

    dialect, endpoint, discriminator = OPENAI, Endpoint("/v1/embeddings"), "input"
    example: ClassVar[Mapping[str, JsonValue]] = {"input": ["What is hybrid search?"]}
    aliases = dict.fromkeys(("inputs", "texts", "text", "sentences"), "input")

    input: fields.TextsOrObjects
    model: str | None = Field(None, description="Any name of an embedding model; see /v1/models.")
    encoding_format: fields.EmbeddingType | SkipJsonSchema[fields.EmbeddingTypes] | None = Field(
        None, description="base64 is of little-endian float32; the official clients ask for it."
    )
    embedding_type: fields.EmbeddingType | SkipJsonSchema[fields.EmbeddingTypes] | None = Field(
        None, description="Jina's name for it, and for `output_dtype`; several: an object."
    )
    output_dtype: fields.NumberType | None = Field(
        None, description="Fewer bits; as in /embeddings/."
    )
    dimensions: int | None = Field(None, ge=1, description="Fewer, if the model can.")
    output_dimension: int | None = Field(None, ge=1, description="The same.")
    dimensionality: int | None = Field(None, ge=1, description="The same.")
    input_type: str | None = Field(
        None,
        description="What the texts are for: query, document, classification and others; the "
        "model's prompt for it is read, if it has one.",
    )
    task: str | None = Field(None, description="Jina's name for it.")
    task_type: str | None = Field(None, description="Nomic's name for it.")
    prompt: str | None = Field(
        None, description="Read before each text.", json_schema_extra=PROMPT_SCHEMA
    )
    prompt_name: str | None = Field(
        None, description="A prompt of the model's sentence-transformers configuration."
    )
    truncate: fields.Truncate = None
    truncation: fields.Truncation = None
    truncation_strategy: fields.Truncate = Field(None, description="Mixedbread's name for it.")
    truncation_side: fields.TruncationSide = None
    normalize: bool | None = Field(None, description="To unit length, as by default.")
    normalized: bool | None = Field(None, description="Jina's name for it.")
    use_activation: bool | None = Field(None, description="vLLM's name for it.")
    return_sparse: bool | None = Field(None, description="Lexical weights, too: an extension.")
    return_colbert: bool | None = Field(
        None, description="One vector for each token, too: an extension."
    )
    colbert_pool_factor: int | None = Field(
        None, ge=2, le=MAX_POOL_FACTOR, description="As in /embeddings/: an extension."
    )
    muvera: MuveraSide | None = Field(None, description="As in /embeddings/: an extension.")
    # vLLM's.
    truncate_prompt_tokens: Annotated[fields.Refused, fields.unless(-1)] = None
    add_special_tokens: Annotated[fields.Refused, fields.unless(True)] = None
    padding: Annotated[fields.Refused, fields.unless("do_not_pad")] = None
    embed_dtype: Annotated[fields.Refused, fields.unless("float32")] = None
    endianness: Annotated[fields.Refused, fields.unless("little", "native")] = None
    messages: Annotated[fields.Refused, fields.unless()] = None
    # Jina's.
    late_chunking: Annotated[fields.Refused, fields.unless(False)] = None
    return_multivector: Annotated[fields.Refused, fields.unless(False)] = None
    # NVIDIA's.
    modality: Annotated[fields.Refused, fields.unless("text")] = None
    # Nomic's.
    long_text_mode: Annotated[fields.Refused, fields.unless("truncate")] = None
    max_tokens_per_text: Annotated[fields.Refused, fields.unless()] = None
    # What several name the task in words, which models read as a prompt.
    instruction: Annotated[fields.Refused, fields.unless()] = None

    @property
    def form(self) -> VectorForm:
        """How vectors are written; raises `InvalidRequestError` for fields that differ."""
        formats, types = _unique(self.encoding_format), _unique(self.embedding_type)
        different = InvalidRequestError(
            "the fields encoding_format, embedding_type and output_dtype differ: send one of them"
        )
        if len(formats) > 1 or len(types) > 1:
            several, other = (formats, types) if len(formats) > 1 else (types, formats)
            if self.output_dtype is not None or other not in {(), ("float",), ("base64",)}:
                raise different
            if self.return_colbert:
                raise InvalidRequestError(
                    "the fields return_colbert and embedding_type exclude each other where that "
                    "names several types: send one type"
                )
            return VectorForm("float32", as_base64="base64" in other, types=several)
        numbers = {*types, self.output_dtype} - {None, "base64"}
        # Clients send it by default, beside the type that they want.
        if formats != ("float",):
            numbers |= {*formats} - {"base64"}
        if len(numbers) > 1 or {"float", "base64"} == {*formats, *types}:
            raise different
        kind: Any = next(iter(numbers), "float")
        return VectorForm(fields.DTYPES[kind], as_base64="base64" in {*formats, *types})

    @property
    def truncation_options(self) -> TruncationOptions:
        """How texts are cut."""
        how = fields.value_of(self, "truncate", "truncation", "truncation_strategy")
        return fields.truncation_of(how, self.truncation_side)

    @property
    def known_task(self) -> fields.Task:
        """What the texts are for; raises `InvalidRequestError` for an unknown value, or for two."""
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
        types = {each.input_type for each in tasks if each.input_type is not None}
        if len(types) > 1:
            raise InvalidRequestError(
                "the fields input_type, task and task_type differ: send one of them"
            )
        prompts = tuple(prompt for each in tasks for prompt in each.prompts)
        return fields.Task(next(iter(types), None), prompts)


class OpenAIItem(BaseModel):
    """What there is of one text beside its dense vector."""

    object: Literal["embedding"]
    index: int
    scale: float | None = Field(
        None, description="Gives the vector back; with int8 and uint8 only."
    )
    sparse: SparseIndices | None = None
    colbert: list[list[float]] | None = None
    colbert_scale: list[float] | None = None
    muvera: list[float] | None = None


class OpenAIEmbedding(OpenAIItem):
    """The vector of one text, of unit length."""

    embedding: list[float]


class Base64Embedding(OpenAIItem):
    """The same, with `encoding_format` base64."""

    embedding: str


class TypedEmbedding(OpenAIItem):
    """The same, with several of `embedding_type`: numbers or base64 of each."""

    embedding: dict[str, Any]


class OpenAIEmbeddings(BaseModel):
    """Vectors in the order of the request."""

    object: Literal["list"]
    data: list[OpenAIEmbedding | Base64Embedding | TypedEmbedding]
    model: str
    usage: Usage
    warnings: list[TruncationWarning] | None = Field(None, description="Only where there are some.")


class OpenAIErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(BaseModel):
    """OpenAI's shape of an error, with `detail`, which Voyage's clients read."""

    error: OpenAIErrorDetails
    detail: str


TAG = {"name": "OpenAI", "description": "Also below /models/{model}, for that model alone."}

# Azure's clients, too, can be told in their own shape that there is nothing.
router = Router(OPENAI, OpenAIError, [TAG], below=("/v1/", "/openai/"), tags=[TAG["name"]])


@router.work("/v1/embeddings", OpenAIEmbeddings, summary="Embed texts")
@router.work("/models/{model:path}/embeddings", OpenAIEmbeddings, include_in_schema=False)
@router.work("/models/{model:path}/v1/embeddings", OpenAIEmbeddings, include_in_schema=False)
async def embed_input(body: OpenAIEmbeddingRequest, call: Call) -> Response:
    """A dense vector of each text, of unit length. /embeddings takes the same body."""
    of_path = "model" in call.path_params
    model = find_embedder(call) if of_path else call.service.catalogue.embedder(body.model)
    form, task = body.form, body.known_task
    normalize = fields.value_of(body, "normalize", "normalized", "use_activation")
    request = EmbedRequest(
        body.input,
        Outputs(True, bool(body.return_sparse), bool(body.return_colbert)),
        normalize_dense=normalize is not False,
        truncation=body.truncation_options,
        prompt=body.prompt,
        prompt_name=body.prompt_name,
        input_type=task.input_type,
        preferred_prompts=task.prompts,
        dimensions=fields.value_of(body, "dimensions", "output_dimension", "dimensionality"),
        output_dtype=form.dtype,
        colbert_pool_factor=body.colbert_pool_factor,
        muvera=body.muvera,
    )
    check_rendering(request)
    result = await embed(call, request, field="input", model=model, allowed=OPENAI_TEXTS)
    reserve_rendering_memory(result.embeddings, request, call.context.answer)
    return await call.render(partial(_render, result, model, request, form))


def _render(
    result: EmbeddingResult, model: ServedModel, request: EmbedRequest, form: VectorForm
) -> Iterator[bytes]:
    items = (
        _render_embedding(index, vectors_of(embedding, request), form)
        for index, embedding in enumerate(result.embeddings)
    )
    answer: dict[str, Any] = {"object": "list", "data": render_items(items), "model": model.name}
    answer["usage"] = usage_as_json(result.tokens)
    warnings = [truncation_as_json(cut, "input") for cut in result.truncations]
    warnings += map(replacement_as_json, result.replaced)
    if warnings:
        answer["warnings"] = warnings
    return render_object(answer)


def _render_embedding(index: int, vectors: TextVectors, form: VectorForm) -> Iterator[bytes]:
    item: dict[str, Any] = {"object": "embedding", "index": index}
    if (dense := vectors.dense) is not None:
        made = {kind: quantize(dense.values, fields.DTYPES[kind]) for kind in form.types}
        several = {
            kind: vector_as_json(each.values, as_base64=form.as_base64 or kind == "base64")
            for kind, each in made.items()
        }
        item["embedding"] = several or vector_as_json(dense.values, as_base64=form.as_base64)
        # int8 and uint8 of a vector have the same one.
        scales = [each.scales for each in made.values() or [dense] if each.scales is not None]
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
