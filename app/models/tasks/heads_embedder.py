"""Embedding models whose heads read the hidden states of one packed forward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.types import FloatArray, Outputs, SparseVector, TextEmbedding, TokenIds
from app.errors import InferenceError
from app.models.backbones.backbone import Backbone
from app.models.batch.arrays import Indices
from app.models.batch.packing import PackedBatch
from app.models.batch.selection import Spans, select_sequences
from app.models.device.transfer import DeviceRows, HostRows, not_finite, start_copies
from app.models.tasks.device_model import EmbeddingModel
from app.models.text.tokenizer import TextTokenizer

# From the states `[R, hidden]` of the tokens that are read to `[R, ...]`.
TokenHead = Callable[[Tensor], DeviceRows]
# From the states `[T, hidden]` of a batch to `[S, width]`, of the sequences at S packed indices.
SequenceHead = Callable[[Tensor, PackedBatch, Indices], DeviceRows]


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
