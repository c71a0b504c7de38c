"""Embedding requests: split into a task for each model, whose results are merged.

A `VectorSource` makes the vectors: `Forwards` computes them, and a cache (`requests/cache.py`) has
some of them already.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from smart_embedder.engine import clock
from smart_embedder.engine.checks import (
    UNLIMITED,
    AnswerMemory,
    check_options,
    find_prompt,
    refuse_truncation,
    text_truncations,
)
from smart_embedder.engine.model import Embedder, LoadedModels
from smart_embedder.engine.records import (
    NO_OPTIONS,
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
)
from smart_embedder.engine.scheduling.admission import Admission, Tokenized, timings_of
from smart_embedder.engine.scheduling.batcher import DEFAULT_URGENCY, weight_of
from smart_embedder.engine.scheduling.fairness import ConcurrencyLimit
from smart_embedder.engine.scheduling.job import Job
from smart_embedder.observability.tracing import Stage

_FLOAT_BYTES = 4
# A token id and a weight.
_WEIGHT_BYTES = 8 + _FLOAT_BYTES
TOKEN_ID_BYTES = 8
# Its place in a list, and its share of the strings themselves: those of equal tokens are one.
_STRING_BYTES = 16


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """Texts, and what is wanted of them; the fields are as in `Engine.embed`."""

    texts: list[str]
    outputs: Outputs
    options: EmbeddingOptions = NO_OPTIONS
    normalize_dense: bool = False
    urgency: int = DEFAULT_URGENCY
    client: str = ""
    answer: AnswerMemory = UNLIMITED


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
class TaskResult:
    """The tokens and the vectors of each text of a task, in order."""

    task: Task
    texts: list[TokenizedText]
    embeddings: list[TextEmbedding]

    @property
    def tokens(self) -> int:
        """The number of tokens read."""
        return sum(len(text.ids) for text in self.texts)

    def truncations(self, request: EmbedRequest) -> list[Truncation]:
        """The texts that were cut."""
        return _truncations(self.task, self.texts, request)


def _truncations(task: Task, texts: list[TokenizedText], request: EmbedRequest) -> list[Truncation]:
    return text_truncations(task.model, texts, "sentences", request.options.truncation.side)


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of each task, with the stages and jobs that this request needed for them."""

    results: list[TaskResult]
    tokenized: list[Stage]
    jobs: list[Job]


class VectorSource(Protocol):
    """Computes the vectors of texts, or finds them in a cache."""

    async def compute(self, tasks: list[Task], request: EmbedRequest) -> Computed:
        """The vectors of every task of a request; raises the errors of `Engine.embed`."""


class Forwards:
    """A `VectorSource` that computes; each request holds a place in the queue meanwhile."""

    def __init__(self, admission: Admission, waiting: ConcurrencyLimit) -> None:
        self._admission = admission
        self._waiting = waiting

    def waiting_requests(self, client: str) -> int:
        """The number of a client's requests that hold a place in the queue."""
        return self._waiting.held_by(client)

    async def compute(self, tasks: list[Task], request: EmbedRequest) -> Computed:
        """Implement `VectorSource`."""
        client, weight = request.client, weight_of(request.urgency)
        async with self._waiting.hold(client):
            tokenized = [await self._tokenize(task, request) for task in tasks]
            read = [(task, each.value) for task, each in zip(tasks, tokenized, strict=True)]
            if not request.options.truncation.truncate:
                refuse_truncation(
                    [cut for task, texts in read for cut in _truncations(task, texts, request)]
                )
            hold_vectors(read, request.answer)
            jobs = [
                Job(
                    task.model,
                    [text.ids for text in texts],
                    task.outputs,
                    client=client,
                    weight=weight,
                )
                for task, texts in read
            ]
            await self._admission.submit(*jobs)
        results = await self._admission.results(*jobs)
        return Computed(
            [
                TaskResult(task, texts, embeddings)
                for (task, texts), embeddings in zip(read, results, strict=True)
            ],
            [each.stage for each in tokenized],
            jobs,
        )

    async def _tokenize(self, task: Task, request: EmbedRequest) -> Tokenized[list[TokenizedText]]:
        model, texts, prompt = task.model, task.texts, task.prompt
        truncation = request.options.truncation
        call = partial(model.tokenize, texts, prompt, truncation, task.input_type)
        # The prompt counts once for each text, because it is tokenised with each.
        read = [*texts, *([prompt] * len(texts))]
        return await self._admission.tokenize(model, call, read, request.client)


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


class EmbeddingPipeline:
    """Runs embedding requests; `source` computes the vectors or finds them in a cache."""

    def __init__(self, admission: Admission, source: VectorSource) -> None:
        self._admission = admission
        self._source = source

    async def run(self, models: LoadedModels, request: EmbedRequest) -> EmbeddingResult:
        """Embed the texts with as few models as the outputs need."""
        started, options = clock.now(), request.options
        check_options(models, request.outputs, options)
        prompt = find_prompt(models, request.outputs, options)
        computed = await self._source.compute(assign_models(models, request, prompt), request)
        by_task = (result.embeddings for result in computed.results)
        embeddings = [_merge(of_one_text) for of_one_text in zip(*by_task, strict=True)]
        shorter = options.dimensions not in {None, models.dense_model.dense_width}
        # Where a model scales its own vectors, shorter ones are scaled again.
        scale = shorter if models.dense_model.normalizes else request.normalize_dense
        if shorter or scale:
            embeddings = [
                _with_dimensions(each, options.dimensions, scale=scale) for each in embeddings
            ]
        # What could not be counted before: how many weights SPLADE adds, and the token strings.
        size = sum(each.nbytes for each in embeddings)
        size += TOKEN_ID_BYTES * sum(result.tokens for result in computed.results)
        if options.return_tokens:
            size += _STRING_BYTES * sum(map(_rows, embeddings))
        what = f"the vectors of these {len(embeddings)} texts"
        request.answer.need(size, what, "send fewer texts")
        return EmbeddingResult(
            embeddings=embeddings,
            truncations=[cut for each in computed.results for cut in each.truncations(request)],
            tokens=sum(result.tokens for result in computed.results),
            timings=timings_of(started, tokenized=computed.tokenized, jobs=computed.jobs),
            token_strings=(
                # The model of the last task makes sparse and ColBERT vectors.
                await self._token_strings(computed.results[-1], embeddings, request.client)
                if options.return_tokens
                else None
            ),
        )

    async def _token_strings(
        self, result: TaskResult, embeddings: list[TextEmbedding], client: str
    ) -> list[TokenStrings]:
        sequences = [text.ids for text in result.texts]
        call = partial(_token_strings, result.task.model, sequences, embeddings)
        return await self._admission.threads.run(call, result.task.texts, client)


def assign_models(models: LoadedModels, request: EmbedRequest, prompt: str) -> list[Task]:
    """A task for each model that is needed: a separate dense model leaves the rest to the embedder.

    Only the model that makes dense vectors reads `prompt`; another one reads its own default. Only
    models that tell queries from documents read the input type.
    """
    outputs = request.outputs

    def task(model: Embedder, outputs: Outputs, prompt: str) -> Task:
        input_type = request.options.input_type if model.reads_input_type else None
        identity = partial(models.identity_of, model)
        return Task(model, outputs, request.texts, prompt, input_type, identity)

    if models.dense is None:
        return [task(models.embedder, outputs, prompt)]
    own = models.embedder.default_prompt
    if not (outputs.dense or outputs.states):
        return [task(models.embedder, outputs, own)]
    rest = replace(outputs, dense=False, states=False)
    dense = task(models.dense, Outputs(dense=outputs.dense, states=outputs.states), prompt)
    return [dense, task(models.embedder, rest, own)] if rest else [dense]


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
    first: FloatArray = embedding.dense[:dimensions]
    if scale:
        first = first / max(float(np.linalg.norm(first)), 1e-12)
    return replace(embedding, dense=first)


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
