"""Embedding requests: to jobs, through the queue, and back to one result."""

import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from app.engine.admission import Admission, Tokenized, timings_of
from app.engine.batcher import weight_of
from app.engine.concurrency import ConcurrencyLimit
from app.engine.job import Job
from app.engine.loaded_models import LoadedModels
from app.engine.model import Embedder
from app.engine.types import (
    EmbeddingResult,
    FloatArray,
    Outputs,
    TextEmbedding,
    TokenizedText,
    Truncation,
)
from app.errors import InvalidRequestError

MOST_COLBERT_BYTES = 2**30
_BYTES_OF_A_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Part:
    """The kinds of vectors that one model makes for a request."""

    model: Embedder
    outputs: Outputs


@dataclass(frozen=True, slots=True)
class TokenizedTask:
    """A part with its token ids and its job."""

    part: Part
    tokenized: Tokenized[list[TokenizedText]]
    job: Job


class EmbeddingPipeline:
    """Runs embedding requests through the queue."""

    def __init__(self, admission: Admission, waiting: ConcurrencyLimit) -> None:
        self._admission = admission
        self._waiting = waiting

    async def run(
        self,
        models: LoadedModels,
        texts: list[str],
        outputs: Outputs,
        *,
        normalize_dense: bool,
        embedder_only: bool,
        urgency: int,
        client: str,
    ) -> EmbeddingResult:
        """Embed `texts` with as few models as `outputs` needs."""
        started = time.perf_counter()
        async with self._waiting.hold(client):
            work = assign_models(models, outputs, embedder_only=embedder_only)
            admitted = [await self._tokenize(part, texts, urgency, client) for part in work]
            jobs = [each.job for each in admitted]
            await self._admission.submit(*jobs)
        parts = await self._admission.results(*jobs)
        embeddings = [_merge(list(of_one_text)) for of_one_text in zip(*parts, strict=True)]
        if normalize_dense and models.dense is not None and not embedder_only:
            embeddings = [_with_unit_dense(embedding) for embedding in embeddings]
        return EmbeddingResult(
            embeddings=embeddings,
            truncations=[cut for each in admitted for cut in _truncations(each)],
            tokens=sum(len(text.ids) for each in admitted for text in each.tokenized.value),
            timings=timings_of(
                started,
                tokenized=[each.tokenized.stage for each in admitted],
                jobs=jobs,
            ),
        )

    async def _tokenize(
        self, part: Part, texts: list[str], urgency: int, client: str
    ) -> TokenizedTask:
        tokenized = await self._admission.tokenize(
            part.model, partial(part.model.tokenize, texts), texts, client
        )
        sequences = [text.ids for text in tokenized.value]
        if part.outputs.colbert:
            _refuse_too_many_vectors(part.model, sum(map(len, sequences)))
        weight = weight_of(urgency)
        job = Job(part.model, sequences, part.outputs, client=client, weight=weight)
        return TokenizedTask(part, tokenized, job)


def assign_models(
    models: LoadedModels, outputs: Outputs, *, embedder_only: bool = False
) -> list[Part]:
    """Which model makes which kinds: a separate dense model leaves the rest to bge-m3."""
    if models.dense is None or embedder_only or not outputs.dense:
        return [Part(models.embedder, outputs)]
    rest = replace(outputs, dense=False)
    dense = Part(models.dense, Outputs(dense=True))
    return [dense, Part(models.embedder, rest)] if rest else [dense]


def _refuse_too_many_vectors(model: Embedder, tokens: int) -> None:
    """Raise `InvalidRequestError` if the results of one request would fill the memory."""
    size = tokens * model.colbert_width * _BYTES_OF_A_FLOAT
    if size > MOST_COLBERT_BYTES:
        raise InvalidRequestError(
            f"the ColBERT vectors of these {tokens} tokens need {size} bytes, and one answer may "
            f"hold {MOST_COLBERT_BYTES}: send fewer texts, or set return_colbert to false"
        )


def _merge(parts: list[TextEmbedding]) -> TextEmbedding:
    if len(parts) == 1:
        return parts[0]
    dense, rest = parts
    return TextEmbedding(dense.dense, rest.sparse, rest.colbert)


def _with_unit_dense(embedding: TextEmbedding) -> TextEmbedding:
    return replace(embedding, dense=_unit(embedding.dense))


def _unit(vector: FloatArray | None) -> FloatArray | None:
    if vector is None:
        return None
    unit: FloatArray = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return unit


def _truncations(admitted: TokenizedTask) -> list[Truncation]:
    model = admitted.part.model
    return [
        Truncation("sentences", index, model.name, model.max_length, text.original_tokens)
        for index, text in enumerate(admitted.tokenized.value)
        if text.truncated
    ]
