"""What a dialect does between its body and its answer: the engine's work, checked and counted."""

from dataclasses import dataclass, replace

from app.api.checks import check_passages, check_rerank_options, check_texts
from app.api.handler import Call
from app.api.model_catalogue import Role, ServedModel
from app.engine import RerankRequest
from app.engine.reranking import sigmoid
from app.engine.types import EmbeddingResult, Outputs, RerankResult


async def embed(
    call: Call,
    texts: list[str],
    outputs: Outputs,
    *,
    field: str,
    model: ServedModel,
    normalize: bool = True,
) -> EmbeddingResult:
    """Vectors of `texts`, which the request has in `field`; `model` makes the dense ones."""
    service = call.service
    check_texts(texts, field, service.settings)
    work = service.engine.embed(
        texts,
        dense=outputs.dense,
        sparse=outputs.sparse,
        colbert=outputs.colbert,
        normalize_dense=normalize,
        embedder_only=model.role is Role.EMBEDDER,
        urgency=call.urgency,
        client=call.context.client,
    )
    result = await call.run(work, sentences=len(texts))
    service.metrics.sentences.inc(len(texts))
    return result


@dataclass(frozen=True, slots=True)
class Passages:
    """The texts to score for one query; `field` is what the request calls their list."""

    query: str
    texts: list[str]
    field: str


async def rerank(
    call: Call, passages: Passages, *, instruction: str | None = None, raw: bool = False
) -> RerankResult:
    """A score for each text: a probability, or with `raw` what the model gives.

    The scores of late interaction, which has no probabilities, are given through a sigmoid, which
    keeps their order.
    """
    service = call.service
    check_passages(passages.query, passages.texts, passages.field, service.settings)
    check_rerank_options(service.engine.models, instruction=instruction)
    request = RerankRequest(
        passages.query,
        passages.texts,
        normalize=not raw,
        instruction=instruction,
        urgency=call.urgency,
        client=call.context.client,
    )
    result = await call.run(service.engine.rerank(request), passages=len(passages.texts))
    service.metrics.pairs.inc(len(passages.texts))
    is_fused = result.parts is not None
    return replace(result, scores=sigmoid(result.scores)) if is_fused and not raw else result
