"""The base classes of models: a forward is launched, and its results are collected later."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from app.engine.loaded_models import ModelInfo
from app.engine.options import CUT_AT_END, InputType, TruncationOptions
from app.engine.types import (
    Outputs,
    SpecialToken,
    TextEmbedding,
    TokenIds,
    TokenizedText,
    TokenSpans,
)
from app.errors import InferenceError
from app.models.backbones.backbone import Backbone
from app.models.batch.marks import without_marks
from app.models.text.tokenizer import TextTokenizer

Result = TypeVar("Result")


class DeviceModel(ABC, Generic[Result]):
    """Implements `app.engine.model.Model` but for `launch`."""

    max_batch_sequences: int | None = None

    def __init__(self, name: str, backbone: Backbone, tokenizer: TextTokenizer) -> None:
        self.name = name
        self._backbone = backbone
        self._tokenizer = tokenizer

    @property
    def max_length(self) -> int:
        """The most tokens of one sequence, special tokens included."""
        return self._tokenizer.max_length

    @property
    def info(self) -> ModelInfo:
        """How it is computed."""
        return self._backbone.target.describe(self.name)

    @property
    def special_tokens(self) -> tuple[list[SpecialToken], list[SpecialToken]]:
        """The special tokens before, and those after, every text."""
        return self._tokenizer.special_tokens

    def token_spans(self, text: str) -> Iterator[TokenSpans]:
        """The tokens of a whole text, without special ones, slice by slice."""
        return self._tokenizer.spans(text)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of these tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

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
        """Launch one forward for all sequences, with `outputs` of each.

        Returns a function that waits for the forward, in any thread, and returns one result for
        each sequence, in order: an `InferenceError` for one with a number that is not finite.
        """

    def forward(self, sequences: list[TokenIds], outputs: Outputs) -> list[Result | InferenceError]:
        """Launch with the same kinds for every sequence, and wait."""
        return self.launch(sequences, [outputs] * len(sequences))()


class EmbeddingModel(DeviceModel[TextEmbedding]):
    """Implements `app.engine.model.Embedder` but for `launch` and attributes without a value."""

    kinds: Outputs
    pooling: str
    normalizes: bool
    prompts: Mapping[str, str]
    min_dimensions: int | None = None
    reads_input_type = False
    default_prompt = ""
    # Numbers in each ColBERT vector.
    colbert_width = 0

    @property
    def dense_width(self) -> int:
        """Numbers in a dense vector."""
        return self._backbone.hidden_size

    @property
    def states_width(self) -> int:
        """Numbers in a hidden state."""
        return self._backbone.hidden_size

    def tokenize(
        self,
        texts: list[str],
        prompt: str = "",
        truncation: TruncationOptions = CUT_AT_END,
        input_type: InputType | None = None,
    ) -> list[TokenizedText]:
        """Token ids of each text behind `prompt`, cut to `max_length`; special tokens stay."""
        del input_type  # Most models read queries and documents alike, or have a prompt for each.
        return self._tokenizer.encode(texts, prompt, truncation)

    def colbert_tokens(self, ids: TokenIds) -> TokenIds:
        """The token of each ColBERT vector."""
        return without_marks(ids[self._with_vector(ids)])

    def _with_vector(self, ids: TokenIds) -> slice | npt.NDArray[np.bool_]:
        """Which tokens have a ColBERT vector: in bge-m3 all but the first, the dense vector's."""
        del ids
        return slice(1, None)

    def token_strings(self, ids: TokenIds) -> list[str]:
        """The strings of these tokens in the vocabulary."""
        return self._tokenizer.token_strings(ids)
