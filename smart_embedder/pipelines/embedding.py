"""Embedding requests: divide the work between models, compute it, and merge the results."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from smart_embedder.errors import EmptyInputError
from smart_embedder.interface import Embedder, LoadedModels
from smart_embedder.pipelines.validation import check_embedding, check_truncations, text_truncations
from smart_embedder.requests import (
    AnswerMemory,
    EmbedRequest,
    InputType,
    Outputs,
    with_memory,
)
from smart_embedder.results import EmbeddingResult, Stage, TextEmbedding, TokenStrings, Truncation
from smart_embedder.scheduling.admission import Admission, ConcurrencyLimit
from smart_embedder.scheduling.job import Job, timings_of
from smart_embedder.tokens import ImageTokens, TokenizedText

_FLOAT_BYTES = 4
# A token id and a weight.
_WEIGHT_BYTES = 8 + _FLOAT_BYTES
TOKEN_ID_BYTES = 8
# A reference to a token string, and a share of the string itself: equal tokens share one string.
_STRING_BYTES = 16


@dataclass(slots=True, eq=False)
class ModelWork:
    """The work of one model for a request: the `outputs` of each text or `ImageInput`.

    `prompt` is read before each text. `input_type` is set only if the model distinguishes queries
    and documents. When the work is done, `read` and `embeddings` hold the tokens and the vectors of
    each text, `stage` the time of the tokenizer, and `job` the work of the device. The last two are
    None if the cache had all vectors.
    """

    model: Embedder
    outputs: Outputs
    texts: list[Any]
    prompt: str = ""
    input_type: InputType | None = None
    read: list[TokenizedText] = field(default_factory=list)
    embeddings: list[TextEmbedding] = field(default_factory=list)
    stage: Stage | None = None
    job: Job | None = None


def find_truncations(works: list[ModelWork], request: EmbedRequest) -> list[Truncation]:
    """Return the truncations of all texts by all models."""
    side = request.truncation.side
    return [
        truncation
        for work in works
        # The native field; `app.handler` renames it for other APIs.
        for truncation in text_truncations(work.model, work.read, "sentences", side)
    ]


def reserve_vectors(works: list[ModelWork], answer: AnswerMemory) -> None:
    """Reserve memory for the vectors of all models; raises as `AnswerMemory.reserve`."""
    size = tokens = of_images = 0
    for work in works:
        lengths = [len(text.ids) for text in work.read]
        size += count_vector_bytes(work.model, work.outputs, lengths)
        of_images += count_image_bytes(work.read)
        tokens += sum(lengths)
    source, advice = f"{len(works[-1].texts)} texts", "send fewer texts"
    if any(work.outputs.colbert for work in works):
        source = f"{tokens} tokens"
        advice = "send fewer texts or shorter ones, or ask for no vector of each token"
    if of_images:
        source, advice = f"{len(works[-1].texts)} texts and pictures", "send fewer pictures"
    answer.reserve(size + of_images, f"the vectors of these {source}", advice)


def count_vector_bytes(model: Embedder, outputs: Outputs, lengths: list[int]) -> int:
    """Return the bytes of the vectors and token ids of texts with these lengths in tokens.

    A text has at most one sparse weight for each token. SPLADE adds others, which are counted when
    the vectors are computed.
    """
    tokens = sum(lengths)
    bytes_per_token = TOKEN_ID_BYTES + outputs.sparse * _WEIGHT_BYTES
    bytes_per_token += _FLOAT_BYTES * outputs.colbert * model.colbert_width
    dense_bytes = len(lengths) * outputs.dense * model.dense_width * _FLOAT_BYTES
    return tokens * bytes_per_token + dense_bytes


def count_image_bytes(read: Sequence[TokenizedText]) -> int:
    """Return the bytes of the arrays that models read of pictures."""
    return sum([text.ids.array_bytes for text in read if isinstance(text.ids, ImageTokens)])


class EmbeddingPipeline:
    """Serves embedding requests. Each holds a permit of `waiting` until its last batch is taken."""

    def __init__(self, admission: Admission, waiting: ConcurrencyLimit) -> None:
        self._admission = admission
        self._waiting = waiting

    async def embed(self, models: LoadedModels, request: EmbedRequest) -> EmbeddingResult:
        """Embed the texts with the models that the outputs need; see `EngineCore.embed`."""
        if not request.texts:
            raise EmptyInputError("there are no texts to embed")
        async with self._admission.accepted.scope():
            started = time.perf_counter()
            works = assign_models(models, request, prompt=check_embedding(models, request))
            await self.compute(works, request)
            embeddings = works[-1].embeddings
            if len(works) > 1:
                embeddings = [
                    replace(rest, dense=dense.dense)
                    for dense, rest in zip(works[0].embeddings, embeddings, strict=True)
                ]
            shorter = request.dimensions not in {None, models.dense_model.dense_width}
            # If a model normalizes its vectors, shortened vectors are normalized again.
            normalize = shorter if models.dense_model.normalizes else request.normalize_dense
            if shorter or normalize:
                embeddings = [
                    _shorten_dense(embedding, request.dimensions, normalize=normalize)
                    for embedding in embeddings
                ]
            # Count again, now with the weights that SPLADE added and with the token strings.
            tokens = sum([len(text.ids) for work in works for text in work.read])
            size = TOKEN_ID_BYTES * tokens + sum([embedding.nbytes for embedding in embeddings])
            if request.return_tokens:
                size += _STRING_BYTES * sum(map(_count_token_vectors, embeddings))
            subject = f"the vectors of these {len(embeddings)} texts"
            request.answer.reserve(size, subject, "send fewer texts")
            strings = None
            if request.return_tokens:
                # The last model computes the sparse and ColBERT vectors.
                call = partial(_find_token_strings, works[-1], embeddings)
                strings = await self._admission.threads.run(call, request.texts, request.client)
            stages = [work.stage for work in works if work.stage is not None]
            jobs = [work.job for work in works if work.job is not None]
            timings = timings_of(started, tokenized=stages, jobs=jobs)
            truncations = find_truncations(works, request)
            return EmbeddingResult(embeddings, truncations, tokens, timings, strings)

    async def compute(self, works: list[ModelWork], request: EmbedRequest) -> None:
        """Do the work of all models for a request; raises the errors of `EngineCore.embed`."""
        client = request.client
        jobs = []
        async with self._waiting.hold(client):
            for work in works:
                call = partial(
                    work.model.tokenize,
                    work.texts,
                    work.prompt,
                    request.truncation,
                    work.input_type,
                )
                # The prompt is tokenized with each text, so it counts once for each.
                texts = [*work.texts, *([work.prompt] * len(work.texts))]
                work.read, work.stage = await self._admission.tokenize(
                    work.model, call, texts, client
                )
            if not request.truncation.truncate:  # Otherwise the results report them.
                check_truncations(find_truncations(works, request), request.truncation)
            reserve_vectors(works, request.answer)
            if request.charge is not None:
                request.charge(sum(len(text.ids) for work in works for text in work.read))
            for work in works:
                sequences = [text.ids for text in work.read]
                work.job = Job.of(request, work.model, sequences, work.outputs)
                jobs.append(work.job)
            await self._admission.submit(*jobs)
        results = await self._admission.results(*jobs)
        for work, embeddings in zip(works, results, strict=True):
            work.embeddings = embeddings


def assign_models(models: LoadedModels, request: EmbedRequest, prompt: str) -> list[ModelWork]:
    """Divide a request between the models that it needs.

    A separate dense model computes the dense vectors, and the embedder the others. Only the model
    of the dense vectors reads `prompt`; the other reads its default prompt. Only models that
    distinguish queries and documents read the input type.
    """
    texts = with_memory(request.texts, request.answer)

    def assign(model: Embedder, outputs: Outputs, prompt: str) -> ModelWork:
        input_type = request.input_type if model.reads_input_type else None
        return ModelWork(model, outputs, texts, prompt, input_type)

    outputs, embedder = request.needed, models.embedder
    if models.dense is None:
        return [assign(embedder, outputs, prompt)]
    works = [
        assign(models.dense, Outputs(dense=outputs.dense), prompt),
        assign(embedder, replace(outputs, dense=False), embedder.default_prompt),
    ]
    return [work for work in works if work.outputs]


def _count_token_vectors(embedding: TextEmbedding) -> int:
    """Return the number of sparse weights and ColBERT vectors."""
    weights = 0 if embedding.sparse is None else len(embedding.sparse.indices)
    return weights + (0 if embedding.colbert is None else len(embedding.colbert))


def _shorten_dense(
    embedding: TextEmbedding, dimensions: int | None, *, normalize: bool
) -> TextEmbedding:
    """Keep the first dimensions of the dense vector, and scale it to unit length if asked for."""
    if embedding.dense is None:
        return embedding
    dense = embedding.dense[:dimensions]
    if normalize:
        dense = dense / max(float(np.linalg.norm(dense)), 1e-12)
    return replace(embedding, dense=dense)


def _find_token_strings(work: ModelWork, embeddings: Sequence[TextEmbedding]) -> list[TokenStrings]:
    """Return the token strings of the sparse and ColBERT vectors of a model."""
    colbert_ids = [
        None if embedding.colbert is None else work.model.colbert_tokens(text.ids)
        for text, embedding in zip(work.read, embeddings, strict=True)
    ]
    sparse_ids = [
        None if embedding.sparse is None else embedding.sparse.indices for embedding in embeddings
    ]
    # Each distinct token is looked up once, and equal tokens share one string.
    present = [ids for ids in (*colbert_ids, *sparse_ids) if ids is not None]
    distinct = np.unique(np.concatenate(present))
    strings = dict(zip(distinct.tolist(), work.model.token_strings(distinct), strict=True))
    return [
        TokenStrings(
            sparse=None if sparse is None else [strings[id_] for id_ in sparse.tolist()],
            colbert=None if colbert is None else [strings[id_] for id_ in colbert.tolist()],
        )
        for sparse, colbert in zip(sparse_ids, colbert_ids, strict=True)
    ]
