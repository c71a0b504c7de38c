"""Embedders: launch a forward, compute the requested kinds of vectors, and collect them later.

`HeadsEmbedder` computes several kinds of vectors from the same states. For bge-m3 (`M3Embedder`)
these are dense vectors, lexical weights and ColBERT vectors.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from smart_embedder.errors import InferenceError
from smart_embedder.hardware.transfer import DeviceRows, HostRows, not_finite_error, start_copies
from smart_embedder.kernels.backend import Backend
from smart_embedder.kernels.packed_batch import (
    TOKEN_ID,
    End,
    Indices,
    PackedBatch,
    Spans,
    select_sequences,
    select_tokens,
    to_device,
)
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.heads.pooling import mean
from smart_embedder.models.runner import DeviceModel
from smart_embedder.models.tokenizer import NO_IDS, TextTokenizer
from smart_embedder.requests import CUT_AT_END, InputType, Outputs, TruncationOptions
from smart_embedder.results import FloatArray, SparseVector, TextEmbedding
from smart_embedder.tokens import TokenIds, TokenizedText

# Tokens without a lexical weight: special, padding and unknown ones.
_WITHOUT_WEIGHT = ("<s>", "</s>", "<pad>", "<unk>", "[CLS]", "[SEP]", "[PAD]", "[UNK]")

# From the states `[R, hidden]` of selected tokens to `[R, ...]`.
TokenHead = Callable[[Tensor], DeviceRows]
# From the states `[T, hidden]` of a batch to `[S, width]`, for the sequences at S packed indices.
SequenceHead = Callable[[Tensor, PackedBatch, Indices], DeviceRows]


class EmbeddingModel(DeviceModel[TextEmbedding]):
    """Implements `interface.Embedder` except `launch` and the attributes without a value."""

    kinds: Outputs
    pooling: str
    normalizes: bool
    similarity = "cosine"
    min_dimensions: int | None = None
    reads_input_type = reads_images = False
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
        self.dense_width = backbone.hidden_size
        self.token_strings = tokenizer.token_strings

    def tokenize(
        self,
        texts: list[str],
        prompt: str = "",
        truncation: TruncationOptions = CUT_AT_END,
        input_type: InputType | None = None,
    ) -> list[TokenizedText]:
        """Tokenize each text behind `prompt`, cut to `max_length`; special tokens stay."""
        del input_type  # Most models read queries and documents alike, or by different prompts.
        return self._tokenizer.encode(texts, prompt, truncation)

    def colbert_tokens(self, ids: TokenIds) -> TokenIds:
        """Return the token id of each ColBERT vector."""
        return ids[self._with_vector(ids)] & TOKEN_ID

    def _with_vector(self, ids: TokenIds) -> slice | npt.NDArray[np.bool_]:
        """Select the tokens with a ColBERT vector: in bge-m3 all but the first, `<s>`."""
        del ids
        return slice(1, None)


class HeadsEmbedder(EmbeddingModel):
    """Implements `DeviceModel.launch`: each head computes one kind, for the texts that request it.

    Heads are named as in `Outputs`; a kind without a head is left out. Subclasses set the heads.
    Dense vectors are computed from one token of each text, `_dense_end`, or from several if that is
    None. Tokens in `_without_weight` have no lexical weight.
    """

    _dense_head: SequenceHead | None = None
    _dense_end: End | None = None
    _token_heads: Mapping[str, TokenHead] = {}
    _without_weight = NO_IDS

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[TextEmbedding | InferenceError]]:
        """Implement `DeviceModel`."""
        needs_all = any(requested.sparse or requested.colbert for requested in outputs)
        packed = self._backbone.pack(sequences)
        hidden, computed = self._backbone.forward_of(packed, None if needs_all else self._dense_end)
        # The rows of each kind on the device, and the span of them that belongs to each sequence.
        rows: dict[str, DeviceRows] = {}
        spans: dict[str, Spans] = {}
        wants_dense = [requested.dense for requested in outputs]
        if self._dense_head is not None and any(wants_dense):
            chosen, spans["dense"] = select_sequences(computed, wants_dense)
            rows["dense"] = self._dense_head(hidden, computed, chosen)
        # Kinds that read the same tokens share their gathered states.
        gathered: dict[tuple[bool, ...], tuple[Tensor, Spans]] = {}
        for kind, head in self._token_heads.items():
            selected = tuple([getattr(requested, kind) for requested in outputs])
            if not any(selected):
                continue
            if selected not in gathered:
                tokens, token_spans = select_tokens(packed, selected, self._backbone.multiple_of)
                states = hidden if tokens is None else hidden.index_select(0, tokens)
                gathered[selected] = states, token_spans
            states, spans[kind] = gathered[selected]
            rows[kind] = head(states)
        if not rows:
            return lambda: [TextEmbedding()] * len(sequences)
        copies = start_copies([*rows.values()], packed.tokens)
        return partial(self._collect, copies, sequences, spans)

    def _collect(
        self,
        copies: Callable[[], list[HostRows]],
        sequences: list[TokenIds],
        spans: Mapping[str, Spans],
    ) -> list[TextEmbedding | InferenceError]:
        """Collect the results; `spans` has the kinds in the order of the copies."""
        results: list[dict[str, Any]] = [{} for _ in sequences]
        failed: set[int] = set()
        for (kind, all_spans), host in zip(spans.items(), copies(), strict=True):
            requested = {index: span for index, span in enumerate(all_spans) if span is not None}
            if not host.finite.all():
                failed |= {
                    index for index, span in requested.items() if not host.finite[span].all()
                }
            texts = [sequences[index] for index in requested]
            rows = [host.values[span] for span in requested.values()]
            for index, vectors in zip(requested, self._to_vectors(kind, texts, rows), strict=True):
                results[index][kind] = vectors
        return [
            not_finite_error() if index in failed else TextEmbedding(**kinds)
            for index, kinds in enumerate(results)
        ]

    def _to_vectors(
        self, kind: str, sequences: list[TokenIds], rows: list[FloatArray]
    ) -> Sequence[Any]:
        """Convert the rows of each sequence to the vectors that `TextEmbedding` holds."""
        match kind:
            case "dense":
                return [row[0] for row in rows]
            case "sparse":
                return collect_sparse_vectors(sequences, rows, self._without_weight)
        return [row[self._with_vector(ids)] for row, ids in zip(rows, sequences, strict=True)]


def compute_colbert_vectors(head: nn.Module, backbone: Backbone, states: Tensor) -> DeviceRows:
    """Compute `[R, colbert width]`, rows of unit length, from states `[R, hidden]`."""
    return DeviceRows(*backbone.backend.unit_rows(head(states), backbone.wire_dtype))


def find_tokens_without_weight(tokenizer: TextTokenizer) -> TokenIds:
    """Return the ids of special, padding and unknown tokens, as far as the vocabulary has them."""
    ids = map(tokenizer.token_id, _WITHOUT_WEIGHT)
    return np.array([id_ for id_ in ids if id_ is not None], np.int64)


def collect_sparse_vectors(
    sequences: list[TokenIds], weights: list[FloatArray], without_weight: TokenIds
) -> list[SparseVector]:
    """Keep, for each sequence, the largest weight of each distinct token, if it is above 0.

    Tokens in `without_weight` are left out. The whole batch is sorted once; no array is as long as
    the vocabulary.
    """
    ids = np.concatenate(sequences)
    values = np.concatenate(weights)
    owner = np.repeat(np.arange(len(sequences)), list(map(len, sequences)))
    kept = (values > 0) & ~np.isin(ids, without_weight)
    keys, inverse = np.unique(owner[kept] << 32 | ids[kept], return_inverse=True)
    largest = np.zeros(len(keys), dtype=np.float32)
    np.maximum.at(largest, inverse, values[kept])
    borders = np.searchsorted(keys, np.arange(1, len(sequences)) << 32)
    indices = keys & 0xFFFFFFFF
    pairs = zip(np.split(indices, borders), np.split(largest, borders), strict=True)
    return [SparseVector(index, value) for index, value in pairs]


def compute_dense_vectors(
    backend: Backend, pooling: str, hidden: Tensor, packed: PackedBatch, sequences: Indices
) -> DeviceRows:
    """Compute `[S, hidden]` float32 of unit length, for the packed indices in `sequences`."""
    if pooling == "cls":
        if len(packed.unpack_order) == 1:  # It begins the batch: no index is copied to the device.
            return DeviceRows(*backend.unit_rows(hidden[:1], torch.float32))
        first = to_device(hidden.device, packed.offsets[sequences])
        return DeviceRows(*backend.unit_rows(hidden, torch.float32, first))
    chosen = to_device(hidden.device, sequences)
    return DeviceRows(*backend.unit_rows(mean(hidden, packed), torch.float32, chosen))


def compute_token_weights(head: nn.Module, states: Tensor) -> DeviceRows:
    """Compute the logits `[R]` of lexical weights, which count if above 0, from `[R, hidden]`."""
    return DeviceRows.of(head(states).squeeze(-1))
