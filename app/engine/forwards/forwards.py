"""Vectors by computation: tokenised, queued, and run through forwards."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from app.engine.admission.admission import Admission, Tokenized
from app.engine.admission.concurrency import ConcurrencyLimit
from app.engine.admission.truncation import refuse_truncation, text_truncations
from app.engine.answer_memory import UNLIMITED, AnswerMemory
from app.engine.model import Embedder
from app.engine.options import InputType, TruncationOptions
from app.engine.scheduling.batcher import weight_of
from app.engine.scheduling.job import Job
from app.engine.types import Outputs, TextEmbedding, TokenizedText, Truncation
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
