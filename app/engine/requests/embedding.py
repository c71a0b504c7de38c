"""Embedding requests: split into a task for each model, whose results are merged."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from app.engine import clock
from app.engine.checks import (
    UNLIMITED,
    AnswerMemory,
    check_options,
    find_prompt,
    refuse_truncation,
    text_truncations,
)
from app.engine.model import Embedder, LoadedModels
from app.engine.records import (
    EmbeddingOptions,
    EmbeddingResult,
    FloatArray,
    InputType,
    Outputs,
    TextEmbedding,
    TokenIds,
    TokenizedText,
    TokenStrings,
    Truncation,
    TruncationOptions,
)
from app.engine.scheduling.admission import Admission, Tokenized, timings_of
from app.engine.scheduling.batcher import weight_of
from app.engine.scheduling.fairness import ConcurrencyLimit
from app.engine.scheduling.job import Job
from app.observability.tracing import Stage

_FLOAT_BYTES = 4
# A token id and a weight.
_WEIGHT_BYTES = 8 + _FLOAT_BYTES
TOKEN_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Task:
    """What one model does for a request: it makes the kinds in `outputs` of each text.

    The model reads `prompt` before each text. `input_type` is set only for a model that reads
    queries and documents differently. `identity` returns a text that differs between any two models
    whose vectors of one text differ, in this process and in others; it is called only with a cache.
    """

    model: Embedder
    outputs: Outputs
    texts: list[str]
    prompt: str = ""
    input_type: InputType | None = None
    identity: Callable[[], str] = str


@dataclass(frozen=True, slots=True)
class Reading:
    """How the texts of a request are read, its urgency and client, and what it may hold."""

    truncation: TruncationOptions
    urgency: int
    client: str
    answer: AnswerMemory = UNLIMITED


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The tokens and the vectors of each text of a task, in order."""

    task: Task
    texts: list[TokenizedText]
    embeddings: list[TextEmbedding]

    @property
    def tokens(self) -> int:
        """The number of tokens read."""
        return sum(len(text.ids) for text in self.texts)

    def truncations(self, reading: Reading) -> list[Truncation]:
        """The texts that were cut."""
        return text_truncations(self.task.model, self.texts, "sentences", reading.truncation.side)


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of each task, with the stages and jobs that this request needed for them."""

    results: list[TaskResult]
    tokenized: list[Stage]
    jobs: list[Job]


class VectorSource(Protocol):
    """Computes the vectors of texts, or finds them in a cache."""

    async def compute(self, tasks: list[Task], reading: Reading) -> Computed:
        """The vectors of every task; raises the errors of `Engine.embed`."""


@dataclass(frozen=True, slots=True)
class _AdmittedTask:
    """A task with its tokenised texts and its job."""

    task: Task
    tokenized: Tokenized[list[TokenizedText]]
    job: Job


class Forwards:
    """A `VectorSource` that computes; each request holds a place in the queue meanwhile."""

    def __init__(self, admission: Admission, waiting: ConcurrencyLimit) -> None:
        self._admission = admission
        self._waiting = waiting

    def waiting_requests(self, client: str) -> int:
        """The number of a client's requests that hold a place in the queue."""
        return self._waiting.held_by(client)

    async def compute(self, tasks: list[Task], reading: Reading) -> Computed:
        """Implement `VectorSource`."""
        async with self._waiting.hold(reading.client):
            admitted = [await self._admit(task, reading) for task in tasks]
            if not reading.truncation.truncate:
                refuse_truncation([cut for each in admitted for cut in _cuts(each, reading)])
            hold_vectors(((each.task, each.tokenized.value) for each in admitted), reading.answer)
            jobs = [each.job for each in admitted]
            await self._admission.submit(*jobs)
        results = await self._admission.results(*jobs)
        return Computed(
            [
                TaskResult(each.task, each.tokenized.value, embeddings)
                for each, embeddings in zip(admitted, results, strict=True)
            ],
            [each.tokenized.stage for each in admitted],
            jobs,
        )

    async def _admit(self, task: Task, reading: Reading) -> _AdmittedTask:
        model, texts, prompt = task.model, task.texts, task.prompt
        # The prompt counts once for each text, because it is tokenised with each.
        read = [*texts, *([prompt] * len(texts))]
        call = partial(model.tokenize, texts, prompt, reading.truncation, task.input_type)
        tokenized = await self._admission.tokenize(model, call, read, reading.client)
        sequences = [text.ids for text in tokenized.value]
        weight = weight_of(reading.urgency)
        job = Job(model, sequences, task.outputs, client=reading.client, weight=weight)
        return _AdmittedTask(task, tokenized, job)


def _cuts(admitted: _AdmittedTask, reading: Reading) -> list[Truncation]:
    return TaskResult(admitted.task, admitted.tokenized.value, []).truncations(reading)


def hold_vectors(
    tokenized: Iterable[tuple[Task, list[TokenizedText]]], answer: AnswerMemory
) -> None:
    """Hold what the vectors of all tasks need; raises as `AnswerMemory.need`."""
    size = tokens = texts = 0
    by_token = False
    for task, read in tokenized:
        lengths = [len(text.ids) for text in read]
        size += vector_bytes(task.model, task.outputs, lengths)
        by_token |= task.outputs.colbert or task.outputs.states
        tokens, texts = tokens + sum(lengths), len(read)
    if not by_token:
        answer.need(size, f"the vectors of these {texts} texts", "send fewer texts")
    else:
        answer.need(
            size,
            f"the vectors of these {tokens} tokens",
            "send fewer texts or shorter ones, or ask for no vector of each token",
        )


def vector_bytes(model: Embedder, outputs: Outputs, lengths: list[int]) -> int:
    """What vectors of texts with so many tokens hold, their token ids included.

    A text has at most one sparse weight for each token. SPLADE, which adds further ones, is counted
    when its vectors are there.
    """
    tokens = sum(lengths)
    of_token = TOKEN_ID_BYTES + outputs.sparse * _WEIGHT_BYTES
    of_token += _FLOAT_BYTES * outputs.colbert * model.colbert_width
    of_token += _FLOAT_BYTES * outputs.states * model.states_width
    return tokens * of_token + len(lengths) * outputs.dense * model.dense_width * _FLOAT_BYTES


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
