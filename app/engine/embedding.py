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
from app.engine.option_checks import check_options, find_prompt
from app.engine.options import EmbeddingOptions, TruncationOptions
from app.engine.truncation import refuse_truncation, text_truncations
from app.engine.types import (
    EmbeddingResult,
    FloatArray,
    Outputs,
    TextEmbedding,
    TokenIds,
    TokenizedText,
    TokenStrings,
    Truncation,
)
from app.errors import InvalidRequestError

MOST_COLBERT_BYTES = 2**30
_BYTES_OF_A_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Part:
    """The kinds of vectors that one model makes for a request, and what it reads before texts."""

    model: Embedder
    outputs: Outputs
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class TokenizedTask:
    """A part with its token ids and its job."""

    part: Part
    tokenized: Tokenized[list[TokenizedText]]
    truncations: list[Truncation]
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
        options: EmbeddingOptions,
        normalize_dense: bool,
        urgency: int,
        client: str,
    ) -> EmbeddingResult:
        """Embed `texts` with as few models as `outputs` needs."""
        started = time.perf_counter()
        check_options(models, outputs, options)
        work = assign_models(models, outputs, find_prompt(models, outputs, options))
        async with self._waiting.hold(client):
            admitted = [
                await self._tokenize(part, texts, options.truncation, urgency, client)
                for part in work
            ]
            truncations = [cut for each in admitted for cut in each.truncations]
            if not options.truncation.truncate:
                refuse_truncation(truncations)
            jobs = [each.job for each in admitted]
            await self._admission.submit(*jobs)
        parts = await self._admission.results(*jobs)
        embeddings = [_merge(list(of_one_text)) for of_one_text in zip(*parts, strict=True)]
        if _needs_scaling(models.dense_model, options.dimensions, normalize=normalize_dense):
            embeddings = [_with_unit_dense(each, options.dimensions) for each in embeddings]
        return EmbeddingResult(
            embeddings=embeddings,
            truncations=truncations,
            tokens=sum(len(text.ids) for each in admitted for text in each.tokenized.value),
            timings=timings_of(
                started,
                tokenized=[each.tokenized.stage for each in admitted],
                jobs=jobs,
            ),
            token_strings=(
                # The last model makes sparse and ColBERT vectors.
                await self._name_tokens(admitted[-1], embeddings, texts, client)
                if options.return_tokens
                else None
            ),
        )

    async def _tokenize(
        self,
        part: Part,
        texts: list[str],
        truncation: TruncationOptions,
        urgency: int,
        client: str,
    ) -> TokenizedTask:
        # A reference to the prompt for each text: what is counted is what will be read.
        read = [*texts, *([part.prompt] * len(texts))]
        call = partial(part.model.tokenize, texts, part.prompt, truncation)
        tokenized = await self._admission.tokenize(part.model, call, read, client)
        sequences = [text.ids for text in tokenized.value]
        _refuse_too_many_vectors(part, sum(map(len, sequences)))
        weight = weight_of(urgency)
        job = Job(part.model, sequences, part.outputs, client=client, weight=weight)
        cuts = text_truncations(part.model, tokenized.value, "sentences", truncation.side)
        return TokenizedTask(part, tokenized, cuts, job)

    async def _name_tokens(
        self, task: TokenizedTask, embeddings: list[TextEmbedding], texts: list[str], client: str
    ) -> list[TokenStrings]:
        sequences = [text.ids for text in task.tokenized.value]
        call = partial(_token_strings, task.part.model, sequences, embeddings)
        return await self._admission.run_off_loop(call, texts, client)


def assign_models(models: LoadedModels, outputs: Outputs, prompt: str = "") -> list[Part]:
    """Which model makes which kinds: a separate dense model leaves the rest to bge-m3.

    The model that makes dense vectors reads the prompt.
    """
    if models.dense is None:
        return [Part(models.embedder, outputs, prompt)]
    if not (outputs.dense or outputs.states):
        return [Part(models.embedder, outputs)]
    rest = replace(outputs, dense=False, states=False)
    dense = Part(models.dense, Outputs(dense=outputs.dense, states=outputs.states), prompt)
    return [dense, Part(models.embedder, rest)] if rest else [dense]


def _refuse_too_many_vectors(part: Part, tokens: int) -> None:
    """Raise `InvalidRequestError` if the results of one request would fill the memory."""
    model, outputs = part.model, part.outputs
    width = outputs.colbert * model.colbert_width + outputs.states * model.dense_width
    size = tokens * width * _BYTES_OF_A_FLOAT
    if size > MOST_COLBERT_BYTES:
        what, advice = "vectors", "send fewer texts"
        if not outputs.states:
            what, advice = "ColBERT vectors", f"{advice}, or set return_colbert to false"
        raise InvalidRequestError(
            f"the {what} of these {tokens} tokens need {size} bytes, and one answer may hold "
            f"{MOST_COLBERT_BYTES}: {advice}"
        )


def _merge(parts: list[TextEmbedding]) -> TextEmbedding:
    if len(parts) == 1:
        return parts[0]
    dense, rest = parts
    return TextEmbedding(dense.dense, rest.sparse, rest.colbert, dense.states)


def _needs_scaling(model: Embedder, dimensions: int | None, *, normalize: bool) -> bool:
    """Whether dense vectors are to be scaled to unit length, which those of some models have."""
    if model.normalizes and dimensions in {None, model.dense_width}:
        return False
    return normalize or dimensions is not None


def _with_unit_dense(embedding: TextEmbedding, dimensions: int | None) -> TextEmbedding:
    if embedding.dense is None:
        return embedding
    return replace(embedding, dense=_unit(embedding.dense[:dimensions]))


def _unit(vector: FloatArray) -> FloatArray:
    unit: FloatArray = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return unit


def _token_strings(
    model: Embedder, sequences: list[TokenIds], embeddings: list[TextEmbedding]
) -> list[TokenStrings]:
    behind = [
        None if made.colbert is None else model.colbert_tokens(sequence)
        for sequence, made in zip(sequences, embeddings, strict=True)
    ]
    weighted = [None if made.sparse is None else made.sparse.indices for made in embeddings]
    # Each token is looked up once: the strings of equal tokens are one object.
    ids = np.unique(np.concatenate([each for each in (*behind, *weighted) if each is not None]))
    names = dict(zip(ids.tolist(), model.token_strings(ids), strict=True))
    return [
        TokenStrings(
            sparse=None if sparse is None else [names[each] for each in sparse.tolist()],
            colbert=None if colbert is None else [names[each] for each in colbert.tolist()],
        )
        for sparse, colbert in zip(weighted, behind, strict=True)
    ]
