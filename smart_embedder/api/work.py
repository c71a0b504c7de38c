"""The work behind every dialect: requests are checked, run by the engine, and counted."""

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from smart_embedder.api.catalogue import Role, ServedModel, name_of
from smart_embedder.api.formats.vectors import VectorOptions
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
    EmbeddingOptions,
    RerankRequest,
    TruncationOptions,
)
from smart_embedder.engine.checks import AnswerMemory, wanted_kinds
from smart_embedder.engine.model import LoadedModels
from smart_embedder.engine.records import (
    CUT_AT_END,
    NO_OPTIONS,
    ClassificationResult,
    EmbeddingResult,
    Outputs,
    RerankResult,
)
from smart_embedder.engine.requests.reranking import sigmoid
from smart_embedder.errors import InvalidRequestError, TextTooLongError

Scoring = TypeVar("Scoring", RerankRequest, ClassificationRequest)


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


@dataclass(frozen=True, slots=True)
class EmbeddingWork:
    """What a request wants of its texts; without `model`, from the default models together."""

    outputs: Outputs
    model: ServedModel | None
    options: EmbeddingOptions = NO_OPTIONS
    normalize: bool = True

    def run(
        self, texts: list[str], call: Call, urgency: int, answer: AnswerMemory
    ) -> Coroutine[Any, Any, EmbeddingResult]:
        """Embed texts that have been checked."""
        name, outputs = name_of(self.model), self.outputs
        return call.service.engine.embed(
            texts,
            dense=outputs.dense,
            sparse=outputs.sparse,
            colbert=outputs.colbert,
            states=outputs.states,
            normalize_dense=self.normalize,
            options=self.options,
            urgency=urgency,
            client=call.context.client,
            answer=answer,
            model=name,
            models=call.leased.get(name),
        )


def native_work(
    fields: EmbeddingFields,
    model: ServedModel | None,
    models: LoadedModels,
    media_type: str,
    binary: list[str],
) -> tuple[EmbeddingWork, VectorOptions]:
    """What is asked for, and what is made of its vectors; `binary` are the formats beside JSON.

    Raises `InvalidRequestError` for options that contradict each other, and for a number type that
    the format does not have.
    """
    # A kind that the request leaves out is made if it can be.
    said = fields.model_fields_set
    outputs = wanted_kinds(
        models,
        dense=fields.return_dense if "return_dense" in said else None,
        sparse=fields.return_sparse if "return_sparse" in said else None,
        colbert=fields.return_colbert if "return_colbert" in said else None,
    )
    if not (outputs or fields.muvera):
        raise InvalidRequestError(
            "nothing is asked for: set return_dense, return_sparse or return_colbert to true"
        )
    check_truncation(fields.truncate, fields.truncation_side)
    dtype, as_base64 = fields.output_dtype, fields.encoding == "base64"
    vectors = VectorOptions(outputs, dtype, fields.colbert_pool_factor, fields.muvera)
    vectors.check(queries=fields.input_type == "query", tokens=fields.return_tokens)
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
    options = EmbeddingOptions(
        truncation=TruncationOptions(fields.truncate, fields.truncation_side),
        prompt=fields.prompt,
        prompt_name=fields.prompt_name,
        input_type=fields.input_type,
        dimensions=fields.dimensions,
        return_tokens=fields.return_tokens,
    )
    # Vectors with fewer dimensions always have unit length.
    normalize = fields.normalize_dense or fields.dimensions is not None
    return EmbeddingWork(vectors.needed, model, options, normalize), vectors


def model_names(models: LoadedModels) -> dict[str, str]:
    """The fields of an answer that name the model behind each kind of vectors."""
    dense, own = models.dense_model.name, models.embedder.name
    return {
        "model_name": dense,
        "dense_model_name": dense,
        "sparse_model_name": own,
        "colbert_model_name": own,
    }


async def embed(
    call: Call,
    texts: list[str],
    outputs: Outputs,
    *,
    field: str,
    model: ServedModel,
    options: EmbeddingOptions = NO_OPTIONS,
    normalize: bool = True,
    allowed: int = 0,
) -> EmbeddingResult:
    """Embed `texts`, which are in the request's `field`; `model` makes the dense vectors.

    As many as `allowed` are never too many. Without `normalize` the vectors are the model's own,
    which may have unit length all the same.
    """
    check_texts(texts, field, call.service.settings, allowed=allowed)
    await call.lease(model)
    with _errors_name("sentences", field):
        return await compute(call, texts, EmbeddingWork(outputs, model, options, normalize))


async def compute(call: Call, texts: list[str], work: EmbeddingWork) -> EmbeddingResult:
    """Embed texts that have been checked, and count them."""
    asked = work.run(texts, call, urgency_of(call.request), call.context.answer)
    result = await call.run(asked, sentences=len(texts))
    call.service.metrics.sentences.inc(len(texts))
    return result


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


@dataclass(frozen=True, slots=True)
class Passages:
    """The texts to score for a query, or each for its own; the request calls their list `field`."""

    query: str | list[str]
    texts: list[str]
    field: str
    truncation: TruncationOptions = CUT_AT_END


async def rerank(
    call: Call,
    passages: Passages,
    model: ServedModel | None,
    *,
    instruction: str | None = None,
    raw: bool = False,
) -> RerankResult:
    """Score each passage: with a probability, or, with `raw`, with the model's own score.

    Late interaction has no probabilities: its scores go through a sigmoid, which keeps the order.
    """
    check_passages(passages.query, passages.texts, passages.field, call.service.settings)
    check_rerank_options(await call.lease(model), instruction=instruction)
    request = RerankRequest(
        passages.query,
        passages.texts,
        normalize=not raw,
        instruction=instruction,
        truncation=passages.truncation,
    )
    with _errors_name("passages", passages.field):
        result = await scores(call, request, model)
    is_fused = result.parts is not None
    return replace(result, scores=sigmoid(result.scores)) if is_fused and not raw else result


async def scores(call: Call, request: RerankRequest, model: ServedModel | None) -> RerankResult:
    """Score passages that have been checked, for the client and with the urgency of `call`."""
    request = _of_call(request, call, model)
    work = call.service.engine.rerank(request, call.leased.get(request.model))
    result = await call.run(work, passages=len(request.passages))
    call.service.metrics.pairs.inc(len(request.passages))
    return result


async def classify(
    call: Call, request: ClassificationRequest, model: ServedModel | None
) -> ClassificationResult:
    """Classify inputs that have been checked, for the client and with the urgency of `call`."""
    work = call.service.engine.classify(_of_call(request, call, model))
    result = await call.run(work, passages=len(request.inputs))
    call.service.metrics.pairs.inc(len(request.inputs))
    return result


def _of_call(request: Scoring, call: Call, model: ServedModel | None) -> Scoring:
    return replace(
        request,
        urgency=urgency_of(call.request),
        client=call.context.client,
        model=name_of(model),
        answer=call.context.answer,
    )
