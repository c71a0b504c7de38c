"""Embedding requests: to tasks for models, and from their results to one answer."""

import time
from dataclasses import replace
from functools import partial

import numpy as np

from app.engine.admission import Admission, timings_of
from app.engine.forwards import Part, PartResult, Reading, Task, VectorSource
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


class EmbeddingPipeline:
    """Runs embedding requests; `source` makes or finds the vectors."""

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
    ) -> EmbeddingResult:
        """Embed `texts` with as few models as `outputs` needs."""
        started = time.perf_counter()
        check_options(models, outputs, options)
        prompt = find_prompt(models, outputs, options)
        work = assign_models(models, outputs, prompt, options.input_type)
        reading = Reading(options.truncation, urgency, client)
        made = await self._source.compute([Task(part, texts) for part in work], reading)
        vectors = (part.embeddings for part in made.parts)
        embeddings = [_merge(list(of_one_text)) for of_one_text in zip(*vectors, strict=True)]
        if _needs_scaling(models.dense_model, options.dimensions, normalize=normalize_dense):
            embeddings = [_with_unit_dense(each, options.dimensions) for each in embeddings]
        return EmbeddingResult(
            embeddings=embeddings,
            truncations=[cut for part in made.parts for cut in part.truncations(reading)],
            tokens=sum(part.tokens for part in made.parts),
            timings=timings_of(started, tokenized=made.tokenized, jobs=made.jobs),
            token_strings=(
                # The last model makes sparse and ColBERT vectors.
                await self._name_tokens(made.parts[-1], embeddings, texts, client)
                if options.return_tokens
                else None
            ),
        )

    async def _name_tokens(
        self, made: PartResult, embeddings: list[TextEmbedding], texts: list[str], client: str
    ) -> list[TokenStrings]:
        sequences = [text.ids for text in made.texts]
        call = partial(_token_strings, made.part.model, sequences, embeddings)
        return await self._admission.run_off_loop(call, texts, client)


def assign_models(
    models: LoadedModels,
    outputs: Outputs,
    prompt: str = "",
    input_type: InputType | None = None,
) -> list[Part]:
    """Which model makes which kinds: a separate dense model leaves the rest to the embedder.

    The model that makes dense vectors reads the prompt, and each that reads it the input type.
    """

    def part(model: Embedder, outputs: Outputs, prompt: str = "") -> Part:
        read_type = input_type if model.reads_input_type else None
        return Part(model, outputs, prompt, partial(models.identity_of, model), read_type)

    if models.dense is None:
        return [part(models.embedder, outputs, prompt)]
    if not (outputs.dense or outputs.states):
        return [part(models.embedder, outputs)]
    rest = replace(outputs, dense=False, states=False)
    dense = part(models.dense, Outputs(dense=outputs.dense, states=outputs.states), prompt)
    return [dense, part(models.embedder, rest)] if rest else [dense]


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
