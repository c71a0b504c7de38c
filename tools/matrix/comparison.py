"""Starts a checkpoint with the engine, and compares its results with the reference's."""

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from transformers import PreTrainedTokenizerFast

from smart_embedder import Engine
from smart_embedder.errors import StartupError, one_line
from smart_embedder.models.files.config import IMAGE_TEXT_TYPES
from smart_embedder.requests import EmbeddingOptions
from tools.matrix.checkpoints import (
    MAX_TOKENS,
    PASSAGES,
    TEXTS,
    NotATextModelError,
    NotBuiltError,
    load_reference,
    save_embedder,
    save_type,
)
from tools.matrix.modules import compute, save_modules
from tools.matrix.shrinking import VOCABULARY

ENCODER, CLASSIFIER, MODULE = KINDS = ("encoder", "classifier", "module")
EQUAL, REFUSED, DIFFERS, TRACEBACK, NOT_BUILT = RESULTS = (
    "equal", "refused", "differs", "traceback", "not built",
)  # fmt: skip
# A model that reads something else than texts.
NO_TEXT = "no text"
# The largest difference, relative to the largest number of the reference if that is above 1.
TOLERANCE = 1e-5
_QUERY = TEXTS[0]

# The numbers of each text.
Results = list[npt.NDArray[np.float32]]
_Run = Callable[[Path], Coroutine[Any, Any, Results]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the engine made of a checkpoint; `detail` is a difference or a sentence."""

    name: str
    kind: str
    result: str
    detail: str = ""

    @property
    def is_failed(self) -> bool:
        """Whether the engine is neither right nor refuses in a sentence."""
        return self.result in (DIFFERS, TRACEBACK)


def try_model(name: str, kind: str, folder: Path) -> Outcome:  # noqa: PLR0911 - One for each result.
    """Build the checkpoint in `folder`, start it with the engine, and compare the results."""
    outcome = partial(Outcome, name, kind)
    run: _Run = _embed
    reference: Callable[[Path], Results] = _encode
    try:
        if kind == MODULE:
            model_class = save_modules(folder, name)
            run = _RUNS.get(model_class, _embed)
            reference = partial(compute, model_class=model_class)
        else:
            save_type(folder, name, is_classifier=kind == CLASSIFIER)
            if kind == CLASSIFIER:
                run, reference = _rerank, _classify
    except NotATextModelError as error:
        return outcome(NO_TEXT, str(error))
    except NotBuiltError as error:
        return outcome(NOT_BUILT, str(error))
    expected: Results = []
    try:
        with torch.inference_mode():
            expected = reference(folder)
    except Exception as error:  # noqa: BLE001 - A model that needs more than a text raises any.
        problem = _sentence(error, folder)
    if not all(np.isfinite(numbers).all() for numbers in expected):
        return outcome(NOT_BUILT, "its random weights overflow")
    try:
        results = asyncio.run(run(folder))
    except StartupError as error:
        return outcome(REFUSED, _sentence(error, folder, name))
    except Exception as error:  # noqa: BLE001 - Any is a failed check.
        return outcome(TRACEBACK, f"{type(error).__name__}: {_sentence(error, folder, name)}")
    if not expected:
        return outcome(DIFFERS, f"starts, and its reference raises {problem}")
    return outcome(*_compare(results, expected))


def _compare(results: Results, expected: Results) -> tuple[str, str]:
    largest = 0.0
    for ours, theirs in zip(results, expected, strict=True):
        if ours.shape != theirs.shape:
            return DIFFERS, f"shape {ours.shape} instead of {theirs.shape}"
        scale = max(1.0, float(np.abs(theirs).max(initial=0.0)))
        largest = max(largest, float(np.abs(ours - theirs).max(initial=0.0)) / scale)
    return (EQUAL if largest <= TOLERANCE else DIFFERS), f"{largest:.0e}"


def _sentence(error: Exception, folder: Path, name: str = "") -> str:
    """Return the error's message in one line, without the folder and the model's name."""
    message = one_line(error).replace(f"{folder}/", "").replace(str(folder), "the folder")
    return re.sub(rf"\b(of type|type) {re.escape(name)}\b", r"\1 ...", message) if name else message


def _encode(folder: Path) -> Results:
    """Compute the mean of the states of each text alone, by transformers.

    The tokenizer is tokenizer.json's; `AutoTokenizer` would make that of some types anew.
    """
    model = load_reference(folder, is_classifier=False)
    model.config.use_cache = False  # Caches of some families need more than a text.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    options = {"truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
    if model.config.model_type in IMAGE_TEXT_TYPES:
        return _encode_beside_images(model, tokenizer, options)
    states = (_compute_states(model, tokenizer(text, **options)) for text in TEXTS)
    return [found[0].mean(0).float().numpy() for found in states]


def _encode_beside_images(model: Any, tokenizer: Any, options: dict[str, Any]) -> Results:
    """Compute the vector of each text in the space of pictures, by transformers."""
    options["max_length"] = min(MAX_TOKENS, model.config.text_config.max_position_embeddings)
    if model.config.model_type.startswith("siglip"):
        options["padding"] = "max_length"
    features = (model.get_text_features(**tokenizer(text, **options)) for text in TEXTS)
    return [found.pooler_output[0].float().numpy() for found in features]


def _compute_states(model: Any, inputs: Any) -> Any:
    """Compute the states of a text, by the encoder if the decoder reads something else."""
    try:
        output = model(**inputs)
        if not hasattr(output, "last_hidden_state"):
            output.last_hidden_state = model(**inputs, output_hidden_states=True).hidden_states[-1]
        if output.last_hidden_state.shape[:2] == inputs["input_ids"].shape:
            return output.last_hidden_state
    except Exception:
        if not model.config.is_encoder_decoder:
            raise
    return model.get_encoder()(**inputs).last_hidden_state


def _classify(folder: Path) -> Results:
    """Compute the logit of each pair alone, by transformers."""
    model = load_reference(folder, is_classifier=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    pairs = (tokenizer(_QUERY, passage, return_tensors="pt") for passage in PASSAGES)
    return [model(**inputs).logits[0, 0].float().numpy() for inputs in pairs]


async def _embed(folder: Path, *, kind: str = "dense", sides: Sequence[Any] = (None,)) -> Results:
    """Embed the texts in one request, as queries and as documents if the modules may differ."""
    results: Results = []
    outputs: dict[str, Any] = {"dense": False} | {kind: True}
    async with Engine(str(folder), dtype="float32", device="cpu") as engine:
        for side in sides:
            options = EmbeddingOptions(input_type=side)
            vectors = await engine.embed(TEXTS, options=options, **outputs)
            if vectors.sparse_indices is not None and vectors.sparse_weights is not None:
                rows = np.zeros((len(TEXTS), VOCABULARY), np.float32)
                weights = zip(rows, vectors.sparse_indices, vectors.sparse_weights, strict=True)
                for row, indices, values in weights:
                    row[indices] = values
                results += list(rows)
            else:
                results += list(
                    vectors.dense if vectors.dense is not None else vectors.colbert or []
                )
    return results


async def _rerank(folder: Path) -> Results:
    """Score the passages; an engine has an embedding model, too."""
    embedder = save_embedder(folder.with_name("embedder"))
    engine = Engine(str(embedder), dtype="float32", device="cpu", reranker=str(folder))
    async with engine:
        return list(await engine.rerank(_QUERY, PASSAGES))


_SIDES = ("query", "document")
_RUNS: Mapping[type, _Run] = {
    SentenceTransformer: partial(_embed, sides=_SIDES),
    SparseEncoder: partial(_embed, kind="sparse", sides=_SIDES),
    MultiVectorEncoder: partial(_embed, kind="colbert", sides=_SIDES),
    CrossEncoder: _rerank,
}
