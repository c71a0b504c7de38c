"""A model on its device: one packed forward, and what is copied back of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from smart_embedder.errors import InferenceError
from smart_embedder.hardware.transfer import DeviceRows, not_finite_error, start_copies
from smart_embedder.interface import ModelInfo
from smart_embedder.kernels.packed_batch import End, PackedBatch
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.files.digest import Content, short
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.requests import CUT_AT_END, Outputs, TruncationOptions
from smart_embedder.results import FloatArray
from smart_embedder.tokens import TokenIds, TokenizedPair
from smart_embedder.vector_space import NONE, RAW, UNIT, VectorSpace

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Made:
    """How one kind of results is made of states, as a `VectorSpace` tells it.

    Names of tensors that are for this kind alone begin with `head`; `steps` is what else is
    computed. `reading` is what is read beside a text, by default the prompts of the model.
    """

    pooling: str
    dimensions: int
    unit_length: bool = False
    head: str = ""
    steps: str = ""
    reading: object = None


class DeviceModel(ABC, Generic[Result]):
    """Implements `smart_embedder.interface.Model` but for `launch`.

    Subclasses set in `_made` how each kind of their results is made. Only embedders have prompts.
    """

    max_batch_sequences: int | None = None
    prompts: Mapping[str, str] = {}
    default_prompt = ""
    _made: Mapping[str, Made]

    def __init__(self, name: str, backbone: Backbone, tokenizer: TextTokenizer) -> None:
        self.name = name
        self.max_length = tokenizer.max_length
        self.special_tokens = tokenizer.special_tokens
        self.token_spans = tokenizer.spans
        self.spaces: Mapping[str, VectorSpace] = {}
        self._backbone = backbone
        self._tokenizer = tokenizer

    @property
    def info(self) -> ModelInfo:
        """How it is computed."""
        return replace(
            self._backbone.target.describe(self.name),
            reproducible=self.reproducible,
            vector_space={kind: str(space) for kind, space in self.spaces.items()},
        )

    @property
    def reproducible(self) -> bool:
        """Implement `smart_embedder.interface.Model`."""
        return self._backbone.reproducible or self.max_batch_sequences == 1

    def run_alone(self) -> None:
        """Give each sequence a forward of its own, if its numbers depend on the batch otherwise."""
        if not self.reproducible:
            self.max_batch_sequences = 1

    def identify(self, content: Content) -> None:
        """Set the spaces of its results, by what was read while it was loaded."""
        heads = tuple(each.head for each in self._made.values() if each.head)
        # Those of modules behind the transformer lie in folders of their own.
        own = {name for name in content.tensors if "/" in name or name.startswith(heads)}
        weights = content.digest(content.tensors.keys() - own, self._backbone.configuration)
        spaces = {}
        for kind, each in self._made.items():
            reading = each.reading or self._prompts_read
            head = {name for name in own if "/" in name or name.startswith(each.head or "/")}
            spaces[kind] = VectorSpace(
                kind,
                weights=short(weights, 12),
                tokenizer=short(self._tokenizer.digest, 8),
                pooling=each.pooling,
                projection=short(content.digest(head, each.steps), 8)
                if head or each.steps
                else NONE,
                normalisation=UNIT if each.unit_length else RAW,
                prompts=short(content.digest((), reading), 8) if reading else NONE,
                truncation=f"{self.max_length}end",
                dimensions=str(each.dimensions),
            )
        self.spaces = spaces

    @property
    def _prompts_read(self) -> object:
        """The prompts, for `Made`; None where there are none."""
        named = sorted((name, text) for name, text in self.prompts.items() if text)
        return (named, self.default_prompt) if named or self.default_prompt else None

    def capture_graphs(self) -> None:
        """Launch small batches as CUDA graphs from now on, where those can be used."""
        for _ in self.capture_graphs_in_steps():
            pass

    def capture_graphs_in_steps(self) -> Iterator[None]:
        """Do the same, and yield wherever the device may do other work."""
        return self._backbone.capture_graphs_in_steps()

    def with_fewer_layers(self) -> tuple[Self, float]:
        """A copy with fewer layers, for measurements only, and by what factor this one has more."""
        fewer = copy(self)
        fewer._backbone, times = self._backbone.with_fewer_layers()  # noqa: SLF001 - its own
        return fewer, times

    @abstractmethod
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[Result | InferenceError]]:
        """Implement `smart_embedder.interface.Model`."""

    def forward(self, sequences: list[TokenIds], outputs: Outputs) -> list[Result | InferenceError]:
        """Launch with the same kinds for every sequence, and wait."""
        return self.launch(sequences, [outputs] * len(sequences))()


class RerankingModel(DeviceModel[float]):
    """Implements `DeviceModel.launch` by the logits of sequences and the scores that they mean.

    `_end` is the only token of a sequence that the logits are made of, if there is one.
    """

    _end: End | None

    @abstractmethod
    def tokenize_pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Implement `smart_embedder.interface.Reranker`."""

    @abstractmethod
    def _logits(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        """`[N]` or `[N, labels]` float32, in packed order, from the states `[T, hidden]`."""

    @abstractmethod
    def _scores(self, logits: FloatArray) -> list[float]:
        """The score of each row of logits."""

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[float | InferenceError]]:
        """Implement `DeviceModel`: the score of each sequence."""
        del outputs
        packed = self._backbone.pack(sequences)
        logits = self._logits(*self._backbone.forward_of(packed, self._end))
        copies = start_copies([DeviceRows.of(logits)], packed.tokens)

        def collect() -> list[float | InferenceError]:
            (rows,) = copies()
            scores = self._scores(rows.values)
            return [
                scores[row] if rows.finite[row] else not_finite_error()
                for row in packed.unpack_order
            ]

        return collect
