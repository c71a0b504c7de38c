"""Embedding requests: split into a task for each model, whose results are merged."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from smart_embedder.errors import EmptyInputError
from smart_embedder.interface import Embedder, LoadedModels
from smart_embedder.pipelines.validation import check_embedding, check_truncations, text_truncations
from smart_embedder.requests import AnswerMemory, EmbedRequest, InputType, Outputs
from smart_embedder.results import EmbeddingResult, Stage, TextEmbedding, TokenStrings, Truncation
from smart_embedder.scheduling.admission import Admission, ConcurrencyLimit
from smart_embedder.scheduling.job import Job, timings_of
from smart_embedder.tokens import TokenizedText

_FLOAT_BYTES = 4
# A token id and a weight.
_WEIGHT_BYTES = 8 + _FLOAT_BYTES
TOKEN_ID_BYTES = 8
# Its place in a list, and its share of the strings themselves: those of equal tokens are one.
_STRING_BYTES = 16


@dataclass(slots=True, eq=False)
class ModelWork:
    """What one model does for a request: it makes the kinds in `outputs` of each text.

    The model reads `prompt` before each text. `input_type` is set only for a model that reads
    queries and documents differently. Once the task is done, `read` and `embeddings` are the tokens
    and the vectors of each text, `stage` is the tokenizer's time and `job` the work of the device,
    both None where a cache had all of it.
    """

    model: Embedder
    outputs: Outputs
    texts: list[str]
    prompt: str = ""
    input_type: InputType | None = None
    read: list[TokenizedText] = field(default_factory=list)
    embeddings: list[TextEmbedding] = field(default_factory=list)
    stage: Stage | None = None
    job: Job | None = None


def truncations_of(tasks: list[ModelWork], request: EmbedRequest) -> list[Truncation]:
    """The texts that were cut."""
    side = request.truncation.side
    return [
        cut for task in tasks for cut in text_truncations(task.model, task.read, "sentences", side)
    ]


def hold_vectors(tasks: list[ModelWork], answer: AnswerMemory) -> None:
    """Hold what the vectors of all tasks need; raises as `AnswerMemory.need`."""
    size = tokens = 0
    for task in tasks:
        lengths = [len(text.ids) for text in task.read]
        size += vector_bytes(task.model, task.outputs, lengths)
        tokens += sum(lengths)
    what, advice = f"{len(tasks[-1].texts)} texts", "send fewer texts"
    if any(task.outputs.colbert for task in tasks):
        what = f"{tokens} tokens"
        advice = "send fewer texts or shorter ones, or ask for no vector of each token"
    answer.need(size, f"the vectors of these {what}", advice)


def vector_bytes(model: Embedder, outputs: Outputs, lengths: list[int]) -> int:
    """What vectors of texts with so many tokens hold, their token ids included.

    A text has at most one sparse weight for each token. SPLADE, which adds further ones, is counted
    when its vectors are there.
    """
    tokens = sum(lengths)
    of_token = TOKEN_ID_BYTES + outputs.sparse * _WEIGHT_BYTES
    of_token += _FLOAT_BYTES * outputs.colbert * model.colbert_width
    return tokens * of_token + len(lengths) * outputs.dense * model.dense_width * _FLOAT_BYTES


class EmbeddingPipeline:
    """Serves embedding requests; each holds a place among those `waiting` until it is computed."""

    def __init__(self, admission: Admission, waiting: ConcurrencyLimit) -> None:
        self._admission = admission
        self._waiting = waiting

    async def embed(self, models: LoadedModels, request: EmbedRequest) -> EmbeddingResult:
        """Embed the texts with as few of the models as the outputs need; see `EngineCore.embed`."""
        if not request.texts:
            raise EmptyInputError("there are no texts to embed")
        async with self._admission.accepted.scope():
            started = time.perf_counter()
            tasks = assign_models(models, request, prompt=check_embedding(models, request))
            await self.compute(tasks, request)
            embeddings = tasks[-1].embeddings
            if len(tasks) > 1:
                embeddings = [
                    replace(rest, dense=dense.dense)
                    for dense, rest in zip(tasks[0].embeddings, embeddings, strict=True)
                ]
            shorter = request.dimensions not in {None, models.dense_model.dense_width}
            # Where a model scales its own vectors, shorter ones are scaled again.
            scale = shorter if models.dense_model.normalizes else request.normalize_dense
            if shorter or scale:
                embeddings = [
                    _with_dimensions(each, request.dimensions, scale=scale) for each in embeddings
                ]
            # What could not be counted before: how many weights SPLADE adds, and the token strings.
            tokens = sum([len(text.ids) for task in tasks for text in task.read])
            size = TOKEN_ID_BYTES * tokens + sum([each.nbytes for each in embeddings])
            if request.return_tokens:
                size += _STRING_BYTES * sum(map(_rows, embeddings))
            what = f"the vectors of these {len(embeddings)} texts"
            request.answer.need(size, what, "send fewer texts")
            strings = None
            if request.return_tokens:
                # The model of the last task makes sparse and ColBERT vectors.
                call = partial(_token_strings, tasks[-1], embeddings)
                strings = await self._admission.threads.run(call, request.texts, request.client)
            stages = [task.stage for task in tasks if task.stage is not None]
            jobs = [task.job for task in tasks if task.job is not None]
            timings = timings_of(started, tokenized=stages, jobs=jobs)
            truncations = truncations_of(tasks, request)
            return EmbeddingResult(embeddings, truncations, tokens, timings, strings)

    async def compute(self, tasks: list[ModelWork], request: EmbedRequest) -> None:
        """Do every task of a request; raises the errors of `EngineCore.embed`."""
        client = request.client
        jobs = []
        async with self._waiting.hold(client):
            for task in tasks:
                call = partial(
                    task.model.tokenize,
                    task.texts,
                    task.prompt,
                    request.truncation,
                    task.input_type,
                )
                # The prompt counts once for each text, because it is tokenised with each.
                texts = [*task.texts, *([task.prompt] * len(task.texts))]
                task.read, task.stage = await self._admission.tokenize(
                    task.model, call, texts, client
                )
            if not request.truncation.truncate:
                check_truncations(truncations_of(tasks, request), request.truncation)
            hold_vectors(tasks, request.answer)
            for task in tasks:
                sequences = [text.ids for text in task.read]
                task.job = Job(
                    task.model, sequences, task.outputs, client=client, is_bulk=request.is_bulk
                )
                jobs.append(task.job)
            await self._admission.submit(*jobs)
        results = await self._admission.results(*jobs)
        for task, embeddings in zip(tasks, results, strict=True):
            task.embeddings = embeddings


def assign_models(models: LoadedModels, request: EmbedRequest, prompt: str) -> list[ModelWork]:
    """A task for each model that is needed: a separate dense model leaves the rest to the embedder.

    Only the model that makes dense vectors reads `prompt`; another one reads its own default. Only
    models that tell queries from documents read the input type.
    """

    def task(model: Embedder, outputs: Outputs, prompt: str) -> ModelWork:
        input_type = request.input_type if model.reads_input_type else None
        return ModelWork(model, outputs, request.texts, prompt, input_type)

    outputs, rest = request.needed, models.embedder
    if models.dense is None:
        return [task(rest, outputs, prompt)]
    of_dense, of_rest = Outputs(dense=outputs.dense), replace(outputs, dense=False)
    both = task(models.dense, of_dense, prompt), task(rest, of_rest, rest.default_prompt)
    return [each for each in both if each.outputs]


def _rows(embedding: TextEmbedding) -> int:
    """The number of its weights and vectors that belong to a token."""
    weights = 0 if embedding.sparse is None else len(embedding.sparse.indices)
    return weights + (0 if embedding.colbert is None else len(embedding.colbert))


def _with_dimensions(
    embedding: TextEmbedding, dimensions: int | None, *, scale: bool
) -> TextEmbedding:
    """With the first numbers of the dense vector, at unit length if it is to `scale`."""
    if embedding.dense is None:
        return embedding
    first = embedding.dense[:dimensions]
    if scale:
        first = first / max(float(np.linalg.norm(first)), 1e-12)
    return replace(embedding, dense=first)


def _token_strings(task: ModelWork, embeddings: Sequence[TextEmbedding]) -> list[TokenStrings]:
    """The strings behind the vectors that the model of `task` has made."""
    behind = [
        None if made.colbert is None else task.model.colbert_tokens(text.ids)
        for text, made in zip(task.read, embeddings, strict=True)
    ]
    weighted = [None if made.sparse is None else made.sparse.indices for made in embeddings]
    # Each token is looked up once: the strings of equal tokens are one object.
    ids = np.unique(np.concatenate([each for each in (*behind, *weighted) if each is not None]))
    names = dict(zip(ids.tolist(), task.model.token_strings(ids), strict=True))
    return [
        TokenStrings(
            sparse=None if sparse is None else [names[each] for each in sparse.tolist()],
            colbert=None if colbert is None else [names[each] for each in colbert.tolist()],
        )
        for sparse, colbert in zip(weighted, behind, strict=True)
    ]
