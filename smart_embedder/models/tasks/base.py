"""What models of all tasks share: a forward is launched, and its results are collected later.

`HeadsEmbedder` computes any of several kinds of vectors of the same states; which heads there are
is its subclasses' affair.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from smart_embedder.engine.model import ModelInfo
from smart_embedder.engine.records import (
    CUT_AT_END,
    FloatArray,
    InputType,
    Outputs,
    SparseVector,
    SpecialToken,
    TextEmbedding,
    TokenIds,
    TokenizedText,
    TokenSpans,
    TruncationOptions,
)
from smart_embedder.errors import InferenceError
from smart_embedder.models.batch.blocks import TOKEN_ID, Indices
from smart_embedder.models.batch.packing import PackedBatch, Spans, select_sequences
from smart_embedder.models.device.transfer import DeviceRows, HostRows, not_finite, start_copies
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.text.tokenizer import TextTokenizer

Result = TypeVar("Result")
# From the states `[R, hidden]` of the tokens that are read to `[R, ...]`.
TokenHead = Callable[[Tensor], DeviceRows]
# From the states `[T, hidden]` of a batch to `[S, width]`, of the sequences at S packed indices.
SequenceHead = Callable[[Tensor, PackedBatch, Indices], DeviceRows]


class DeviceModel(ABC, Generic[Result]):
    """Implements `smart_embedder.engine.model.Model` but for `launch`."""

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
    """Implements `engine.model.Embedder` but for `launch` and attributes without a value."""

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
        return ids[self._with_vector(ids)] & TOKEN_ID

    def _with_vector(self, ids: TokenIds) -> slice | npt.NDArray[np.bool_]:
        """Which tokens have a ColBERT vector: in bge-m3 all but the first, the dense vector's."""
        del ids
        return slice(1, None)

    def token_strings(self, ids: TokenIds) -> list[str]:
        """The strings of these tokens in the vocabulary."""
        return self._tokenizer.token_strings(ids)


@dataclass(frozen=True, slots=True)
class KindRows:
    """The rows of one kind of vectors; `spans` says which of them belong to each sequence."""

    rows: HostRows
    spans: Spans

    def finite(self, index: int) -> bool:
        """Whether all numbers of one sequence are finite; true where it has none."""
        span = self.spans[index]
        return span is None or bool(self.rows.finite[span].all())

    def of(self, index: int) -> FloatArray | None:
        """The rows of one sequence; None where it has none."""
        span = self.spans[index]
        return None if span is None else self.rows.values[span]


class HeadsEmbedder(EmbeddingModel):
    """Implements `DeviceModel.launch`: each head reads the texts that request its kind.

    The names of heads are those of `Outputs`; a kind without a head is left out.
    """

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        tokenizer: TextTokenizer,
        prompts: Mapping[str, str],
        *,
        dense_head: SequenceHead | None = None,
        token_heads: Mapping[str, TokenHead],
    ) -> None:
        super().__init__(name, backbone, tokenizer)
        self.prompts = prompts
        self._dense_head = dense_head
        self._token_heads = token_heads

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[TextEmbedding | InferenceError]]:
        """Implement `DeviceModel`."""
        packed = self._backbone.pack(sequences)
        kinds = self._run_heads(self._backbone.forward(packed), packed, outputs)
        if not kinds:
            return lambda: [TextEmbedding()] * len(sequences)
        copies = start_copies([rows for rows, _ in kinds.values()])
        spans = [spans for _, spans in kinds.values()]

        def collect() -> list[TextEmbedding | InferenceError]:
            rows = map(KindRows, copies(), spans)
            return self._embeddings(sequences, dict(zip(kinds, rows, strict=True)))

        return collect

    def _run_heads(
        self, hidden: Tensor, packed: PackedBatch, outputs: Sequence[Outputs]
    ) -> dict[str, tuple[DeviceRows, Spans]]:
        """Each requested kind, of the sequences that request it, and the rows of each sequence."""
        kinds: dict[str, tuple[DeviceRows, Spans]] = {}
        if self._dense_head is not None and any(requested := [each.dense for each in outputs]):
            sequences, spans = select_sequences(packed, requested)
            kinds["dense"] = self._dense_head(hidden, packed, sequences), spans
        # The states of the same tokens are gathered only once.
        gathered: dict[tuple[bool, ...], tuple[Tensor, Spans]] = {}
        for kind, head in self._token_heads.items():
            key = tuple(getattr(each, kind) for each in outputs)
            if any(key):
                if key not in gathered:
                    tokens = self._backbone.select_tokens(packed, key)
                    gathered[key] = tokens.gather(hidden), tokens.spans
                states, spans = gathered[key]
                kinds[kind] = head(states), spans
        return kinds

    def _embeddings(
        self, sequences: list[TokenIds], kinds: dict[str, KindRows]
    ) -> list[TextEmbedding | InferenceError]:
        sparse = self._sparse_vectors(sequences, kinds.get("sparse"))
        results: list[TextEmbedding | InferenceError] = []
        for index, ids in enumerate(sequences):
            rows = {kind: rows.of(index) for kind, rows in kinds.items()}
            dense, colbert = rows.get("dense"), rows.get("colbert")
            embedding = TextEmbedding(
                dense=None if dense is None else dense[0],
                sparse=sparse.get(index),
                colbert=None if colbert is None else colbert[self._with_vector(ids)],
                states=rows.get("states"),
            )
            is_finite = all(kind.finite(index) for kind in kinds.values())
            results.append(embedding if is_finite else not_finite())
        return results

    def _sparse_vectors(
        self, sequences: list[TokenIds], weights: KindRows | None
    ) -> dict[int, SparseVector]:
        """The sparse vectors, by the index of the sequences that request them: here none."""
        del sequences, weights
        return {}


def token_vectors(head: nn.Module, backbone: Backbone, states: Tensor) -> DeviceRows:
    """`[R, colbert width]`, each of unit length, from states `[R, hidden]`."""
    return DeviceRows(*backbone.backend.unit_rows(head(states), backbone.wire_dtype))


def token_states(states: Tensor) -> DeviceRows:
    """`[R, hidden]` float32: the states themselves."""
    return DeviceRows.of(states.float())
