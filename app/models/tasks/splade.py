"""SPLADE: lexical weights over the whole vocabulary, from the head of a masked language model.

Source: "SPLADE v2" (Formal et al. 2021), as sentence-transformers' `SpladePooling` computes it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from app.engine.types import Outputs, SparseVector, TextEmbedding, TokenIds
from app.errors import InferenceError, StartupError
from app.models.architectures.transformer import preemption_point
from app.models.backbones.backbone import Backbone
from app.models.backbones.families import load_backbone
from app.models.batch.packing import PackedBatch
from app.models.checkpoint.config import read_config
from app.models.checkpoint.modules import require_known_modules
from app.models.checkpoint.sentence_config import (
    TextOptions,
    read_default_prompt,
    read_prompts,
    read_vector_limit,
)
from app.models.checkpoint.weights import Weights
from app.models.device.transfer import not_finite
from app.models.target import Target
from app.models.tasks.device_model import EmbeddingModel
from app.models.tasks.masked_language_head import MaskedLanguageHead, load_masked_language_head
from app.models.text.tokenizer import TextTokenizer

# Logits held at once: 64 MiB of them in float32, whatever the batch.
_MOST_LOGITS = 2**24
_POOLINGS = ("max", "sum")
# How often the logarithm is taken, by the name of `SpladePooling`'s activation.
_LOGARITHMS = {"relu": 1, "log1p_relu": 2}


@dataclass(frozen=True, slots=True)
class SpladePooling:
    """The weight of each token of the vocabulary: the `max` or the `sum` over a text's tokens.

    Of a logit x each of those is log(1 + relu(x)), or that function taken twice. Only the `most`
    largest weights are kept, if it is set.
    """

    sums: bool
    logarithms: int
    most: int | None = None

    @classmethod
    def read(cls, folder: Path, most: int | None = None) -> "SpladePooling":
        """From the module's configuration; raises `StartupError` for what is not known here."""
        config = read_config(folder)
        pooling = config.get("pooling_strategy", "max")
        activation = config.get("activation_function", "relu")
        if pooling not in _POOLINGS or activation not in _LOGARITHMS:
            raise StartupError(
                f"{folder / 'config.json'} has the pooling {pooling} of {activation}; known here: "
                f"{' and '.join(_POOLINGS)} of {' and '.join(_LOGARITHMS)}"
            )
        return cls(pooling == "sum", _LOGARITHMS[activation], most)

    def reduce(self, logits: Tensor) -> Tensor:
        """`[vocabulary]` float32 of some tokens' logits `[rows, vocabulary]`."""
        # The function only rises, so that of the highest logit is the highest.
        return self._weights(logits.float()).sum(0) if self.sums else logits.amax(0).float()

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """What `reduce` gives for the tokens of both."""
        return first + second if self.sums else torch.maximum(first, second)

    def finish(self, reduced: Tensor) -> Tensor:
        """The weights, of whole texts."""
        weights = reduced if self.sums else self._weights(reduced)
        if self.most is None or self.most >= len(weights):
            return weights
        kept = weights.topk(self.most).indices
        return torch.zeros_like(weights).index_copy_(0, kept, weights[kept])

    def _weights(self, logits: Tensor) -> Tensor:
        weights = logits.relu()
        for _ in range(self.logarithms):
            weights = weights.log1p_()
        return weights


class SpladeEmbedder(EmbeddingModel):
    """Implements `app.engine.model.Embedder` for sparse vectors alone."""

    kinds = Outputs(sparse=True)
    pooling = "splade"
    normalizes = False

    def __init__(
        self,
        *,
        name: str,
        backbone: Backbone,
        tokenizer: TextTokenizer,
        head: MaskedLanguageHead,
        splade: SpladePooling,
        prompts: Mapping[str, str],
        default_prompt: str,
    ) -> None:
        super().__init__(name, backbone, tokenizer)
        self.prompts = prompts
        self.default_prompt = default_prompt
        self._head = head
        self._splade = splade

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[TextEmbedding | InferenceError]]:
        """Implement `DeviceModel`.

        It waits for the device: how many weights there are decides the size of the result.
        """
        packed = self._backbone.pack(sequences)
        hidden = self._backbone.forward(packed)
        results: list[TextEmbedding | InferenceError] = [TextEmbedding()] * len(sequences)
        wanted = [index for index, each in enumerate(outputs) if each.sparse]
        for index, weights in self._pool(hidden, packed, wanted):
            results[index] = _embedding(weights)
        return lambda: results

    def _pool(
        self, hidden: Tensor, packed: PackedBatch, wanted: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """The weights `[vocabulary]` of each wanted sequence, a bounded slice of logits at a time.

        Sequences are taken as they are packed, so that a slice holds many short ones.
        """
        order = packed.unpack_order
        rows_at_once = max(1, _MOST_LOGITS // self._head.vocabulary)
        for run in _runs(sorted(wanted, key=lambda index: order[index]), packed, rows_at_once):
            states = hidden[packed.offsets[order[run[0]]] : packed.offsets[order[run[-1]] + 1]]
            if len(run) == 1:
                yield run[0], self._pool_one(torch.split(states, rows_at_once))
            else:
                lengths = [packed.lengths[order[index]] for index in run]
                parts = torch.split(self._logits(states), lengths)
                reduced = map(self._splade.reduce, parts)
                yield from zip(run, map(self._splade.finish, reduced), strict=True)

    def _pool_one(self, slices: Sequence[Tensor]) -> Tensor:
        """The weights of a sequence whose states come in slices."""
        reduced = (self._splade.reduce(self._logits(states)) for states in slices)
        return self._splade.finish(reduce(self._splade.join, reduced))

    def _logits(self, states: Tensor) -> Tensor:
        preemption_point()
        return self._head(states)


def _runs(wanted: list[int], packed: PackedBatch, most: int) -> Iterator[list[int]]:
    """Neighbours of together at most `most` tokens; a longer sequence is alone."""
    run: list[int] = []
    tokens = 0
    for index in wanted:
        position = packed.unpack_order[index]
        length = packed.lengths[position]
        beside = bool(run) and position == packed.unpack_order[run[-1]] + 1
        if run and not (beside and tokens + length <= most):
            yield run
            run, tokens = [], 0
        run.append(index)
        tokens += length
    if run:
        yield run


def _embedding(weights: Tensor) -> TextEmbedding | InferenceError:
    """A sum is not finite as soon as one number is not."""
    indices = weights.nonzero().squeeze(1)
    values = weights[indices].cpu()
    if not bool(weights.sum().isfinite()):
        return not_finite()
    return TextEmbedding(sparse=SparseVector(indices.cpu().numpy(), values.numpy()))


def load_splade_embedder(
    name: str, folder: Path, max_length: int, target: Target, *, pooling: Path
) -> SpladeEmbedder:
    """Load a SPLADE model whose `SpladePooling` is configured in the folder `pooling`.

    Raises `StartupError` for whatever is wrong with them.
    """
    require_known_modules(folder, "Transformer", "MLMTransformer", "SpladePooling")
    weights = Weights.read(folder)
    texts = TextOptions.read(folder)
    backbone, tokenizer = load_backbone(folder, target, max_length, texts, weights=weights)
    return SpladeEmbedder(
        name=name,
        backbone=backbone,
        tokenizer=tokenizer,
        head=load_masked_language_head(folder, weights, backbone),
        splade=SpladePooling.read(pooling, read_vector_limit(folder, "max_active_dims")),
        prompts=read_prompts(folder),
        default_prompt=read_default_prompt(folder),
    )
