"""Embedding requests: split into a task for each model, whose results are merged."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from app.engine import clock
from app.engine.admission.admission import Admission, timings_of
from app.engine.answer_memory import AnswerMemory
from app.engine.forwards.forwards import (
    TOKEN_ID_BYTES,
    Reading,
    Task,
    TaskResult,
    VectorSource,
)
from app.engine.loaded_models import LoadedModels
from app.engine.model import Embedder
from app.engine.option_checks import check_options, find_prompt
from app.engine.options import EmbeddingOptions, InputType
from app.engine.types import (
    EmbeddingResult,
    FloatArray,
    Outputs,
    TextEmbedding,
    TokenIds,
    TokenStrings,
)

# Its place in a list, and its share of the strings themselves: those of equal tokens are one.
_STRING_BYTES = 16


class EmbeddingPipeline:
    """Runs embedding requests; `source` computes the vectors or finds them in a cache."""

    def __init__(self, admission: Admission, source: VectorSource) -> None:
        self._admission = admission
        self._source = source

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
        answer: AnswerMemory,
    ) -> EmbeddingResult:
        """Embed `texts` with as few models as `outputs` needs; `answer` is asked for room first."""
        started = clock.now()
        check_options(models, outputs, options)
        prompt = find_prompt(models, outputs, options)
        tasks = assign_models(models, outputs, texts, prompt, options.input_type)
        reading = Reading(options.truncation, urgency, client, answer)
        computed = await self._source.compute(tasks, reading)
        by_task = (result.embeddings for result in computed.results)
        embeddings = [_merge(of_one_text) for of_one_text in zip(*by_task, strict=True)]
        shorter = options.dimensions not in {None, models.dense_model.dense_width}
        # Where a model scales its own vectors, shorter ones are scaled again.
        scale = shorter if models.dense_model.normalizes else normalize_dense
        if shorter or scale:
            embeddings = [
                _with_dimensions(each, options.dimensions, scale=scale) for each in embeddings
            ]
        _hold_made(embeddings, computed.results, options, answer)
        return EmbeddingResult(
            embeddings=embeddings,
            truncations=[cut for each in computed.results for cut in each.truncations(reading)],
            tokens=sum(result.tokens for result in computed.results),
            timings=timings_of(started, tokenized=computed.tokenized, jobs=computed.jobs),
            token_strings=(
                # The model of the last task makes sparse and ColBERT vectors.
                await self._token_strings(computed.results[-1], embeddings, client)
                if options.return_tokens
                else None
            ),
        )

    async def _token_strings(
        self, result: TaskResult, embeddings: list[TextEmbedding], client: str
    ) -> list[TokenStrings]:
        sequences = [text.ids for text in result.texts]
        call = partial(_token_strings, result.task.model, sequences, embeddings)
        return await self._admission.run_off_loop(call, result.task.texts, client)


def assign_models(
    models: LoadedModels,
    outputs: Outputs,
    texts: list[str],
    prompt: str,
    input_type: InputType | None,
) -> list[Task]:
    """A task for each model that is needed: a separate dense model leaves the rest to the embedder.

    Only the model that makes dense vectors reads `prompt`; another one reads its own default. Only
    models that tell queries from documents read `input_type`.
    """

    def task(model: Embedder, outputs: Outputs, prompt: str) -> Task:
        read_type = input_type if model.reads_input_type else None
        return Task(model, outputs, texts, prompt, read_type, partial(models.identity_of, model))

    if models.dense is None:
        return [task(models.embedder, outputs, prompt)]
    own = models.embedder.default_prompt
    if not (outputs.dense or outputs.states):
        return [task(models.embedder, outputs, own)]
    rest = replace(outputs, dense=False, states=False)
    dense = task(models.dense, Outputs(dense=outputs.dense, states=outputs.states), prompt)
    return [dense, task(models.embedder, rest, own)] if rest else [dense]


def _hold_made(
    embeddings: list[TextEmbedding],
    results: list[TaskResult],
    options: EmbeddingOptions,
    answer: AnswerMemory,
) -> None:
    """Hold what could not be counted before: how many weights SPLADE adds, and token strings."""
    size = sum(each.nbytes for each in embeddings)
    size += TOKEN_ID_BYTES * sum(result.tokens for result in results)
    if options.return_tokens:
        size += _STRING_BYTES * sum(map(_rows, embeddings))
    answer.need(size, f"the vectors of these {len(embeddings)} texts", "send fewer texts")


def _rows(embedding: TextEmbedding) -> int:
    """How many of its numbers or vectors a token stands behind."""
    weights = 0 if embedding.sparse is None else len(embedding.sparse.indices)
    return weights + (0 if embedding.colbert is None else len(embedding.colbert))


def _merge(embeddings: Sequence[TextEmbedding]) -> TextEmbedding:
    """One text's vectors from the task of each model."""
    if len(embeddings) == 1:
        return embeddings[0]
    dense, rest = embeddings
    return TextEmbedding(dense.dense, rest.sparse, rest.colbert, dense.states)


def _with_dimensions(
    embedding: TextEmbedding, dimensions: int | None, *, scale: bool
) -> TextEmbedding:
    """With the first numbers of the dense vector, at unit length if it is to `scale`."""
    if embedding.dense is None:
        return embedding
    first = embedding.dense[:dimensions]
    return replace(embedding, dense=_unit(first) if scale else first)


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
