"""What a dialect does between its body and its answer: the engine's work, checked and counted."""

from app.api.handler import Call
from app.api.limits import check_texts
from app.api.model_catalogue import Role, ServedModel
from app.engine.types import EmbeddingResult, Outputs


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
