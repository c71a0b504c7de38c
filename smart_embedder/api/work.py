"""The work behind every dialect: requests are checked, run by the engine, and counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from smart_embedder.api.catalogue import Role, ServedModel, name_of
from smart_embedder.api.handler import Call, urgency_of
from smart_embedder.api.schemas import (
    EmbeddingFields,
    check_passages,
    check_rerank_options,
    check_texts,
    check_truncation,
)
from smart_embedder.engine import (
    ClassificationRequest,
    EmbedRequest,
    RerankRequest,
    TruncationOptions,
)
from smart_embedder.engine.checks import check_rendering
from smart_embedder.engine.model import LoadedModels
from smart_embedder.engine.records import (
    ClassificationResult,
    EmbeddingResult,
    Outputs,
    RerankResult,
)
from smart_embedder.engine.requests.reranking import sigmoid
from smart_embedder.errors import InvalidRequestError, TextTooLongError

Asked = TypeVar("Asked", EmbedRequest, RerankRequest, ClassificationRequest)


def embedder_of(call: Call, role: Role | None = None) -> ServedModel:
    """The embedding model in the request's path, or else the default one, or that of `role`.

    Raises `InvalidRequestError` where the model in the path makes other kinds, or none.
    """
    catalogue = call.service.catalogue
    name = call.request.path_params.get("model")
    if name is None:
        return catalogue.embedder(None) if role is None else catalogue.with_role(role)
    model = catalogue.find(name)
    if model.role is Role.RERANKER or role not in {None, model.role}:
        raise InvalidRequestError(f"the model {model.name} does not make what is asked for here")
    return model


async def embed(
    call: Call, request: EmbedRequest, *, field: str, model: ServedModel, allowed: int = 0
) -> EmbeddingResult:
    """Embed the texts that are in the request's `field`; `model` makes the dense vectors.

    As many as `allowed` are never too many.
    """
    check_texts(request.texts, field, call.service.settings, allowed=allowed)
    with _errors_name("sentences", field):
        return await compute(call, request, model)


@contextmanager
def _errors_name(ours: str, theirs: str) -> Iterator[None]:
    """Let an error for a text that is too long point to the request's own field."""
    try:
        yield
    except TextTooLongError as error:
        problems = [
            each | {"pointer": each["pointer"].replace(f"/{ours}/", f"/{theirs}/")}
            for each in error.problems
        ]
        raise TextTooLongError(str(error), problems) from None


async def compute(call: Call, request: EmbedRequest, model: ServedModel | None) -> EmbeddingResult:
    """Embed texts that have been checked, and count them; by default all models make vectors."""
    models = await call.lease(model)
    work = call.service.engine.embedding.embed(models, _of_call(request, call, model))
    result = await call.run(work, sentences=len(request.texts))
    call.service.metrics.sentences.inc(len(request.texts))
    return result


async def rerank(
    call: Call, request: RerankRequest, model: ServedModel | None, field: str
) -> RerankResult:
    """Score the passages, which the request calls `field`.

    Late interaction has no probabilities: where `normalize` asks for them, its scores go through a
    sigmoid, which keeps the order.
    """
    check_passages(request.query, request.passages, field, call.service.settings)
    check_rerank_options(await call.lease(model), instruction=request.instruction)
    with _errors_name("passages", field):
        result = await scores(call, request, model)
    if result.parts is None or not request.normalize:
        return result
    return replace(result, scores=sigmoid(result.scores))


async def scores(call: Call, request: RerankRequest, model: ServedModel | None) -> RerankResult:
    """Score passages that have been checked, for the client and with the urgency of `call`."""
    models = await call.lease(model)
    work = call.service.engine.scoring.rerank(models, _of_call(request, call, model))
    result = await call.run(work, passages=len(request.passages))
    call.service.metrics.pairs.inc(len(request.passages))
    return result


async def classify(
    call: Call, request: ClassificationRequest, model: ServedModel | None
) -> ClassificationResult:
    """Classify inputs that have been checked, for the client and with the urgency of `call`."""
    models = await call.lease(model)
    work = call.service.engine.scoring.classify(models, _of_call(request, call, model))
    result = await call.run(work, passages=len(request.inputs))
    call.service.metrics.pairs.inc(len(request.inputs))
    return result


def _of_call(request: Asked, call: Call, model: ServedModel | None) -> Asked:
    context = call.context
    return replace(
        request,
        urgency=urgency_of(call.request),
        client=context.client,
        model=name_of(model),
        answer=context.answer,
    )


def native_request(
    fields: EmbeddingFields,
    texts: list[str],
    models: LoadedModels,
    media_type: str,
    binary: list[str],
) -> EmbedRequest:
    """What these options ask for; `binary` are the formats beside JSON.

    Raises `InvalidRequestError` for options that contradict each other, and for a number type that
    the format does not have.
    """
    # A kind that the request leaves out is made if it can be.
    said, made = fields.model_fields_set, models.kinds
    outputs = Outputs(
        dense=fields.return_dense if "return_dense" in said else made.dense,
        sparse=fields.return_sparse if "return_sparse" in said else made.sparse,
        colbert=fields.return_colbert if "return_colbert" in said else made.colbert,
    )
    if not (outputs or fields.muvera):
        raise InvalidRequestError(
            "nothing is asked for: set return_dense, return_sparse or return_colbert to true"
        )
    check_truncation(fields.truncate, fields.truncation_side)
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
    dtype, as_base64 = fields.output_dtype, fields.encoding == "base64"
    is_json = media_type not in binary
    if is_json and not as_base64 and dtype in {"float16", "bfloat16"}:
        raise InvalidRequestError(
            f"the option output_dtype is {dtype}, which JSON has no numbers for: set encoding to "
            f"base64, or ask for {', '.join(binary)} in Accept"
        )
    if not is_json and as_base64:
        raise InvalidRequestError(
            f"the option encoding is for JSON, and Accept asks for {media_type}: send one of them"
        )
    return request


def model_names(models: LoadedModels) -> dict[str, str]:
    """The fields of an answer that name the model behind each kind of vectors."""
    dense, own = models.dense_model.name, models.embedder.name
    return {
        "model_name": dense,
        "dense_model_name": dense,
        "sparse_model_name": own,
        "colbert_model_name": own,
    }
