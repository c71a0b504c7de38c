"""Vectors by computation: tokenised, queued, and run through forwards."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from app.engine.admission import Admission, Tokenized
from app.engine.batcher import weight_of
from app.engine.concurrency import ConcurrencyLimit
from app.engine.job import Job
from app.engine.model import Embedder
from app.engine.options import InputType, TruncationOptions
from app.engine.truncation import refuse_truncation, text_truncations
from app.engine.types import Outputs, TextEmbedding, TokenizedText, Truncation
from app.errors import InvalidRequestError
from app.observability.tracing import Stage

MOST_COLBERT_BYTES = 2**30
_BYTES_OF_A_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Part:
    """The kinds of vectors that one model makes for a request, and what it reads before texts.

    `identity` tells models apart that make different vectors of one text, also across processes;
    it is asked for only where there is a cache.
    `input_type` is for a model that reads queries in another way than documents.
    """

    model: Embedder
    outputs: Outputs
    prompt: str = ""
    identity: Callable[[], str] = str
    input_type: InputType | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """Texts of a request, and the part that reads them."""

    part: Part
    texts: list[str]


@dataclass(frozen=True, slots=True)
class Reading:
    """How the texts of a request are read, and for whom."""

    truncation: TruncationOptions
    urgency: int
    client: str


@dataclass(frozen=True, slots=True)
class PartResult:
    """What became of a task: the tokens and the vectors of each text, in order."""

    part: Part
    texts: list[TokenizedText]
    embeddings: list[TextEmbedding]

    @property
    def tokens(self) -> int:
        """How many tokens were read."""
        return sum(len(text.ids) for text in self.texts)

    def truncations(self, reading: Reading) -> list[Truncation]:
        """The texts that were cut."""
        return text_truncations(self.part.model, self.texts, "sentences", reading.truncation.side)


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of each task, and the work of this request behind them."""

    parts: list[PartResult]
    tokenized: list[Stage]
    jobs: list[Job]


class VectorSource(Protocol):
    """Makes or finds the vectors of texts."""

    async def compute(self, tasks: list[Task], reading: Reading) -> Computed:
        """The vectors that every task asks for; raises what `Engine.embed` does."""


@dataclass(frozen=True, slots=True)
class _AdmittedTask:
    """A task with its token ids and its job."""

    task: Task
    tokenized: Tokenized[list[TokenizedText]]
    job: Job


class Forwards:
    """Computes vectors, as `VectorSource`; every request holds a place in the queue meanwhile."""

    def __init__(self, admission: Admission, waiting: ConcurrencyLimit) -> None:
        self._admission = admission
        self._waiting = waiting

    def waiting_requests(self, client: str) -> int:
        """How many requests of a client hold a place in the queue."""
        return self._waiting.held_by(client)

    async def compute(self, tasks: list[Task], reading: Reading) -> Computed:
        """Implement `VectorSource`."""
        async with self._waiting.hold(reading.client):
            admitted = [await self._admit(task, reading) for task in tasks]
            if not reading.truncation.truncate:
                refuse_truncation([cut for each in admitted for cut in _cuts(each, reading)])
            jobs = [each.job for each in admitted]
            await self._admission.submit(*jobs)
        results = await self._admission.results(*jobs)
        return Computed(
            [
                PartResult(each.task.part, each.tokenized.value, made)
                for each, made in zip(admitted, results, strict=True)
            ],
            [each.tokenized.stage for each in admitted],
            jobs,
        )

    async def _admit(self, task: Task, reading: Reading) -> _AdmittedTask:
        part, texts = task.part, task.texts
        # A reference to the prompt for each text: what is counted is what will be read.
        read = [*texts, *([part.prompt] * len(texts))]
        call = partial(part.model.tokenize, texts, part.prompt, reading.truncation, part.input_type)
        tokenized = await self._admission.tokenize(part.model, call, read, reading.client)
        sequences = [text.ids for text in tokenized.value]
        refuse_too_many_vectors(part, sum(map(len, sequences)))
        weight = weight_of(reading.urgency)
        job = Job(part.model, sequences, part.outputs, client=reading.client, weight=weight)
        return _AdmittedTask(task, tokenized, job)


def _cuts(admitted: _AdmittedTask, reading: Reading) -> list[Truncation]:
    return PartResult(admitted.task.part, admitted.tokenized.value, []).truncations(reading)


def refuse_too_many_vectors(part: Part, tokens: int) -> None:
    """Raise `InvalidRequestError` if the results of one request would fill the memory."""
    model, outputs = part.model, part.outputs
    width = outputs.colbert * model.colbert_width + outputs.states * model.states_width
    size = tokens * width * _BYTES_OF_A_FLOAT
    if size > MOST_COLBERT_BYTES:
        what, advice = "vectors", "send fewer texts"
        if not outputs.states:
            what, advice = "ColBERT vectors", f"{advice}, or set return_colbert to false"
        raise InvalidRequestError(
            f"the {what} of these {tokens} tokens need {size} bytes, and one answer may hold "
            f"{MOST_COLBERT_BYTES}: {advice}"
        )
