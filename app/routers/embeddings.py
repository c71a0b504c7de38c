"""POST /embeddings/: dense, sparse and ColBERT vectors of texts, this service's own API."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated

from pydantic import Tag
from starlette.responses import Response

from app import schemas
from app.answers import (
    Chunk,
    EmbeddingAnswer,
    describe_models,
    render_embeddings,
    reserve_rendering_memory,
)
from app.body import DescribedBy, discriminate_by
from app.context import NATIVE_EMBEDDINGS
from app.dialects import openai
from app.dialects.openai import OpenAIEmbeddingRequest
from app.formats import SAFETENSORS, media_type_of, render_safetensors
from app.handler import Call, embed_texts
from app.images import read_images
from app.response_schemas import Base64Response, EmbeddingResponse
from app.routing import Router
from app.schemas import EmbeddingFields, EmbeddingRequest
from smart_embedder.errors import InvalidRequestError
from smart_embedder.interface import LoadedModels
from smart_embedder.requests import (
    EmbedRequest,
    ImageInput,
    Outputs,
    TruncationOptions,
    check_rendering,
)

router = Router(
    groups=(
        {"name": "embeddings", "description": "This service's own API, with all kinds of vectors."},
    )
)

EmbeddingsBody = Annotated[
    Annotated[EmbeddingRequest, Tag("sentences")] | Annotated[OpenAIEmbeddingRequest, Tag("input")],
    discriminate_by("sentences", "input"),
    DescribedBy("sentences"),
]


@router.work(
    NATIVE_EMBEDDINGS.path,
    EmbeddingResponse | Base64Response,
    responses={200: {"content": {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}}},
    summary="Embed texts",
    tags=["embeddings"],
)
async def embed_sentences(body: EmbeddingsBody, call: Call) -> Response:
    """Compute dense, sparse and ColBERT vectors of each text in one forward pass.

    A body with `input` is handled as at /v1/embeddings.
    """
    if isinstance(body, OpenAIEmbeddingRequest):
        return await openai.embed_input(body, call)
    model = call.service.catalogue.embedder(body.model) if body.model else None
    media_type = media_type_of(call)
    max_texts = call.service.settings.max_sentences_per_request
    schemas.check_texts(body.sentences, "sentences", max_texts)
    models = await call.lease(model)
    inputs = read_images(body.sentences, "sentences")
    request = build_request(body, inputs, models, media_type)
    call.context.if_vector_space = body.if_vector_space or call.context.if_vector_space
    result = await embed_texts(call, request, model)
    at_once = media_type == SAFETENSORS
    reserve_rendering_memory(result.embeddings, request, call.context.answer, at_once=at_once)
    answer = EmbeddingAnswer(request, result, describe_models(models, call.context.vector_spaces))
    render: Callable[[], Iterable[Chunk]] = partial(
        render_embeddings,
        answer,
        sparse_as_indices=body.sparse_as_indices,
        as_base64=body.encoding == "base64",
    )
    if media_type == SAFETENSORS:
        render = partial(render_safetensors, answer)
    return await call.render(render, media_type)


def build_request(
    fields: EmbeddingFields,
    texts: list[str | ImageInput],
    models: LoadedModels,
    media_type: str,
) -> EmbedRequest:
    """Build the engine's request from the options of the body.

    Raises `InvalidRequestError` for options that contradict each other, and for a number type that
    the format does not have.
    """
    # A kind that the request does not mention is returned if the models have it.
    sent, available = fields.model_fields_set, models.kinds
    outputs = Outputs(
        dense=fields.return_dense if "return_dense" in sent else available.dense,
        sparse=fields.return_sparse if "return_sparse" in sent else available.sparse,
        colbert=fields.return_colbert if "return_colbert" in sent else available.colbert,
    )
    if not (outputs or fields.muvera):
        raise InvalidRequestError(
            "no output is requested: set return_dense, return_sparse or return_colbert to true"
        )
    schemas.check_truncation(fields.truncate, fields.truncation_side)
    request = EmbedRequest(
        texts,
        outputs,
        # Vectors with fewer dimensions always have unit length.
        normalize_dense=fields.normalize_dense or fields.dimensions is not None,
        truncation=TruncationOptions(fields.truncate, fields.truncation_side),
        prompt=fields.prompt,
        prompt_name=fields.prompt_name,
        input_type=fields.input_type,
        dimensions=fields.dimensions,
        return_tokens=fields.return_tokens,
        output_dtype=fields.output_dtype,
        colbert_pool_factor=fields.colbert_pool_factor,
        muvera=fields.muvera,
    )
    check_rendering(request)
    as_base64, is_binary = fields.encoding == "base64", media_type == SAFETENSORS
    if not (is_binary or as_base64) and fields.output_dtype in {"float16", "bfloat16"}:
        raise InvalidRequestError(
            f"the option output_dtype is {fields.output_dtype}, which JSON numbers cannot hold: "
            f"set encoding to base64, or ask for {SAFETENSORS} in Accept"
        )
    if is_binary and as_base64:
        raise InvalidRequestError(
            f"the option encoding is for JSON, and Accept asks for {media_type}: send one of them"
        )
    return request
