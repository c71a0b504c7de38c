"""Rerankers: score a passage by reading it together with the query.

A reranker is a `Scorer`, which computes the logits of token sequences, and a layout of pairs.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smart_embedder.errors import InferenceError, StartupError
from smart_embedder.hardware.transfer import DeviceRows, not_finite_error, start_copies
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.int8 import CALIBRATION_TEXTS
from smart_embedder.models.files.config import (
    CLASSES,
    STATES,
    has_module,
    name_labels,
    read_config,
    read_default_prompt,
    read_modules,
    transformer_folder,
)
from smart_embedder.models.heads.dense import DEFAULT_INSTRUCTION
from smart_embedder.models.heads.pooling import describe_layers
from smart_embedder.models.rerankers.heads import Scorer, load_classifier, load_language_model
from smart_embedder.models.rerankers.pairs import Pairs, QwenPairs, TemplatePairs, TokenizerPairs
from smart_embedder.models.rerankers.templates import (
    Template,
    choose_template,
    is_qwen3_reranker,
    read_chat_template,
)
from smart_embedder.models.runner import DeviceModel, OutputSpec
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.models.tokenizer_options import marks_segments
from smart_embedder.requests import CUT_AT_END, Outputs, TruncationOptions
from smart_embedder.results import FloatArray
from smart_embedder.tokens import TokenIds, TokenizedPair
from smart_embedder.vector_space import SCORE

# The types that are computed as by FlagReranker, which leaves out an empty passage.
_FLAG_TYPES = ("xlm-roberta", "roberta")


class Reranker(DeviceModel[float]):
    """Implements `smart_embedder.interface.Reranker`.

    A score is the raw logit. With several labels it is the log odds of the label at `ranking`,
    whose sigmoid is the probability of that label. With `rates_each`, labels do not exclude one
    another, and the score is the logit of that label. `steps` describes the head for the id of the
    vector space.
    """

    def __init__(
        self,
        name: str,
        scorer: Scorer,
        pairs: Pairs,
        steps: str,
        *,
        labels: Sequence[str] = ("LABEL_0",),
        ranking: int = 0,
        rates_each: bool = False,
    ) -> None:
        super().__init__(name, scorer.backbone, scorer.tokenizer)
        self.reads_instruction = pairs.reads_instruction
        self.always_normalizes = False
        self.temperature = 1.0
        self.labels = tuple(labels)
        self._ranking, self._rates_each = ranking, rates_each
        self._scorer, self._pairs = scorer, pairs
        self._output_specs = {
            SCORE: OutputSpec(scorer.pooling, scorer.labels, steps=steps, reading=pairs.described)
        }

    def tokenize_pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Implement `smart_embedder.interface.Reranker`."""
        return self._pairs.fill(query, passages, instruction, truncation)

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[float | InferenceError]]:
        """Implement `DeviceModel`: the logit of each sequence."""
        del outputs
        scorer, packed = self._scorer, self._backbone.pack(sequences)
        states = self._backbone.forward_of(packed, scorer.end)
        logits = scorer.layers(scorer.pool(*states)).float()
        copies = start_copies([DeviceRows.of(logits)], packed.tokens)

        def collect() -> list[float | InferenceError]:
            (rows,) = copies()
            scores = self._compute_relevance(rows.values).tolist()
            return [
                scores[row] if rows.finite[row] else not_finite_error()
                for row in packed.unpack_order
            ]

        return collect

    def _compute_relevance(self, logits: FloatArray) -> npt.NDArray[np.floating[Any]]:
        """Compute the logit of relevance, `[N]`, of rows `[N, labels]` in a wide format."""
        if len(self.labels) == 1 or self._rates_each:
            return logits[:, self._ranking]
        # In PyTorch, because NumPy warns of numbers that are not finite.
        exact = torch.from_numpy(logits).double()
        relevant = exact[:, self._ranking].clone()
        exact[:, self._ranking] = -torch.inf
        return (relevant - exact.logsumexp(dim=1)).numpy()


def make_reranker(
    name: str,
    folder: Path,
    max_length: int,
    target: Target,
    *,
    max_pairs: int,
    kind: str | None = None,
) -> Reranker:
    """Load a reranker; a language model has at most `max_pairs` pairs in a forward.

    `kind` is that of its entry in MODELS, or the setting RERANKER_KIND. Raises `StartupError` if
    the folder holds no reranker, or one that nothing says how to read.
    """
    template = choose_template(name, folder, kind)
    if template is None:
        return _make_classifier(name, folder, max_length, target, kind)
    model = _make_language_model(name, folder, max_length, target, template)
    model.max_batch_sequences = max_pairs
    return model


def _make_language_model(
    name: str, folder: Path, max_length: int, target: Target, template: Template
) -> Reranker:
    if not is_qwen3_reranker(template):
        scorer = load_language_model(name, folder, max_length, target, template.answers)
        model = Reranker(name, scorer, TemplatePairs(template, scorer.tokenizer), "answer")
        model.temperature = template.temperature
        return model
    # sentence-transformers puts the default prompt into the template as the instruction.
    _require_default_prompt(folder, "", DEFAULT_INSTRUCTION)

    def encode_pairs(tokenizer: TextTokenizer) -> list[TokenIds]:
        query, *passages = CALIBRATION_TEXTS[1::3]
        return [pair.ids for pair in QwenPairs(tokenizer).fill(query, passages, None)]

    scorer = load_language_model(
        name, folder, max_length, target, template.answers, calibrate=encode_pairs
    )
    model = Reranker(name, scorer, QwenPairs(scorer.tokenizer), "yes")
    model.always_normalizes = True
    return model


def _make_classifier(
    name: str, folder: Path, max_length: int, target: Target, kind: str | None
) -> Reranker:
    transformer = transformer_folder(folder)
    config, task = read_config(transformer), STATES if has_module(folder, "Pooling") else CLASSES
    template = read_chat_template(folder, task)
    if template is None:
        _require_default_prompt(folder, "")
    scorer = load_classifier(folder, max_length, target)
    pairs: Pairs
    if template is None:
        # With an empty passage FlagReranker reads only the query.
        drops_empty = config.get("model_type") in _FLAG_TYPES and scorer.labels == 1
        marks = scorer.backbone.reads_segments and marks_segments(transformer)
        pairs = TokenizerPairs(scorer.tokenizer, marks=marks, drops_empty=drops_empty)
    else:
        pairs = TemplatePairs(template, scorer.tokenizer)
    labels = name_labels(config, scorer.labels)
    ranking = _find_label(name, labels, kind)
    return Reranker(
        name,
        scorer,
        pairs,
        f"{ranking} {describe_layers(scorer.layers)}",
        labels=labels,
        ranking=ranking,
        rates_each=config.get("problem_type") == "multi_label_classification",
    )


def _require_default_prompt(folder: Path, *supported: str) -> None:
    """Raise `StartupError` if sentence-transformers would put another prompt before each pair."""
    if read_modules(folder) and (prompt := read_default_prompt(folder)) not in supported:
        raise StartupError(
            f"{folder} has the prompt {prompt!r:.60} for every pair (default_prompt_name), which "
            "is not supported"
        )


def _find_label(name: str, labels: tuple[str, ...], kind: str | None) -> int:
    """Return the index of the label that means relevant: the only one, or the one named `kind`."""
    if kind is None and len(labels) > 1:
        raise StartupError(
            f"{name} has the labels {', '.join(labels)}, and nothing says which of them means that "
            "a passage is relevant: name it as the kind of this model"
        )
    if kind not in {None, *labels}:
        raise StartupError(f"kind={kind} is no label of {name}: it has {', '.join(labels)}")
    return 0 if kind is None else labels.index(kind)
