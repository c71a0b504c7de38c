"""What models of all tasks share: a forward is launched, and its results are collected later.

`HeadsEmbedder` computes any of several kinds of vectors of the same states; which heads there are
is its subclasses' affair.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
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
    TextEmbedding,
    TokenIds,
    TokenizedText,
    TruncationOptions,
)
from smart_embedder.errors import InferenceError
from smart_embedder.models.batch import TOKEN_ID, Indices, PackedBatch, Spans, select_sequences
from smart_embedder.models.device.transfer import DeviceRows, HostRows, not_finite, start_copies
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.text.tokenizer import NO_IDS, TextTokenizer

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
        self.max_length = tokenizer.max_length
        self.special_tokens = tokenizer.special_tokens
        self.token_spans = tokenizer.spans
        self.decode = tokenizer.decode
        self._backbone = backbone
        self._tokenizer = tokenizer

    @property
    def info(self) -> ModelInfo:
        """How it is computed."""
        return self._backbone.target.describe(self.name)

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
        """Implement `smart_embedder.engine.model.Model`."""

    def forward(self, sequences: list[TokenIds], outputs: Outputs) -> list[Result | InferenceError]:
        """Launch with the same kinds for every sequence, and wait."""
        return self.launch(sequences, [outputs] * len(sequences))()


class EmbeddingModel(DeviceModel[TextEmbedding]):
    """Implements `engine.model.Embedder` but for `launch` and attributes without a value."""

    kinds: Outputs
    pooling: str
    normalizes: bool
    min_dimensions: int | None = None
    reads_input_type = False
    colbert_width = 0

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        tokenizer: TextTokenizer,
        prompts: Mapping[str, str],
        default_prompt: str = "",
    ) -> None:
        super().__init__(name, backbone, tokenizer)
        self.prompts = prompts
        self.default_prompt = default_prompt
        self.dense_width = self.states_width = backbone.hidden_size
        self.token_strings = tokenizer.token_strings

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


class HeadsEmbedder(EmbeddingModel):
    """Implements `DeviceModel.launch`: each head reads the texts that request its kind.

    The names of heads are those of `Outputs`; a kind without a head is left out. Subclasses set the
    heads. Tokens in `_without_weight` have no lexical weight.
    """

    _dense_head: SequenceHead | None = None
    _token_heads: Mapping[str, TokenHead]
    _without_weight = NO_IDS

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[TextEmbedding | InferenceError]]:
        """Implement `DeviceModel`."""
        packed = self._backbone.pack(sequences)
        hidden = self._backbone.forward(packed)
        # The rows of each kind on the device, and which of them belong to each sequence.
        rows: dict[str, DeviceRows] = {}
        spans: dict[str, Spans] = {}
        wanted = [each.dense for each in outputs]
        if self._dense_head is not None and any(wanted):
            chosen, spans["dense"] = select_sequences(packed, wanted)
            rows["dense"] = self._dense_head(hidden, packed, chosen)
        # The states of the same tokens are gathered only once.
        gathered: dict[tuple[bool, ...], tuple[Tensor, Spans]] = {}
        for kind, head in self._token_heads.items():
            key = tuple([getattr(each, kind) for each in outputs])
            if any(key):
                if key not in gathered:
                    tokens, own_spans = self._backbone.select_tokens(packed, key)
                    states = hidden if tokens is None else hidden.index_select(0, tokens)
                    gathered[key] = states, own_spans
                states, spans[kind] = gathered[key]
                rows[kind] = head(states)
        if not rows:
            return lambda: [TextEmbedding()] * len(sequences)
        return partial(self._collect, start_copies([*rows.values()]), sequences, spans)

    def _collect(
        self,
        copies: Callable[[], list[HostRows]],
        sequences: list[TokenIds],
        spans: Mapping[str, Spans],
    ) -> list[TextEmbedding | InferenceError]:
        """The results; `spans` has the kinds in the order of the copies."""
        kinds = dict(zip(spans, copies(), strict=True))
        sparse: dict[int, SparseVector] = {}
        if "sparse" in kinds:
            rows, own_rows = kinds["sparse"].values, spans["sparse"]
            weights = {i: rows[span] for i, span in enumerate(own_rows) if span is not None}
            asking = [sequences[index] for index in weights]
            vectors = sparse_vectors(asking, [*weights.values()], self._without_weight)
            sparse = dict(zip(weights, vectors, strict=True))
        results: list[TextEmbedding | InferenceError] = []
        for index, ids in enumerate(sequences):
            own: dict[str, FloatArray] = {}
            is_finite = True
            for kind, host in kinds.items():
                if (span := spans[kind][index]) is not None:
                    own[kind] = host.values[span]
                    is_finite = is_finite and bool(host.finite[span].all())
            dense, colbert = own.get("dense"), own.get("colbert")
            embedding = TextEmbedding(
                dense=None if dense is None else dense[0],
                sparse=sparse.get(index),
                colbert=None if colbert is None else colbert[self._with_vector(ids)],
                states=own.get("states"),
            )
            results.append(embedding if is_finite else not_finite())
        return results


def token_vectors(head: nn.Module, backbone: Backbone, states: Tensor) -> DeviceRows:
    """`[R, colbert width]`, each of unit length, from states `[R, hidden]`."""
    return DeviceRows(*backbone.backend.unit_rows(head(states), backbone.wire_dtype))


def token_states(states: Tensor) -> DeviceRows:
    """`[R, hidden]` float32: the states themselves."""
    return DeviceRows.of(states.float())


def sparse_vectors(
    sequences: list[TokenIds], weights: list[FloatArray], without_weight: TokenIds
) -> list[SparseVector]:
    """For each sequence its largest weight for each distinct token, where above 0.

    Tokens in `without_weight` have none. One sort over the whole batch; never an array as long as
    the vocabulary.
    """
    ids = np.concatenate(sequences)
    values = np.concatenate(weights)
    owner = np.repeat(np.arange(len(sequences)), [len(s) for s in sequences])
    kept = (values > 0) & ~np.isin(ids, without_weight)
    keys, inverse = np.unique(owner[kept] << 32 | ids[kept], return_inverse=True)
    largest = np.zeros(len(keys), dtype=np.float32)
    np.maximum.at(largest, inverse, values[kept])
    borders = np.searchsorted(keys, np.arange(1, len(sequences)) << 32)
    indices = keys & 0xFFFFFFFF
    pairs = zip(np.split(indices, borders), np.split(largest, borders), strict=True)
    return [SparseVector(index, value) for index, value in pairs]
