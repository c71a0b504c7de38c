"""bge-m3, and any checkpoint of its shape: one packed forward, three kinds of vectors."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from app.engine.types import (
    FloatArray,
    Outputs,
    SparseVector,
    TextEmbedding,
    TokenIds,
)
from app.errors import InferenceError
from app.models.backbone import Backbone, load_encoder, load_tokenizer
from app.models.batch.packing import PackedBatch
from app.models.batch.selection import Spans, select_sequences
from app.models.checkpoint.sentence_config import read_pooling, read_prompts
from app.models.checkpoint.weights import read_linear
from app.models.device.transfer import DeviceRows, not_finite
from app.models.target import Target
from app.models.tasks import heads
from app.models.tasks.device_model import EmbeddingModel
from app.models.tasks.kind_rows import KindRows, start_kinds
from app.models.text.template import ids_of
from app.models.text.tokenizer import TextTokenizer

HEADS = _SPARSE_HEAD, _COLBERT_HEAD = "sparse_linear.pt", "colbert_linear.pt"
_FRAME_TOKENS = ("<s>", "</s>", "<pad>", "<unk>", "[CLS]", "[SEP]", "[PAD]", "[UNK]")


class M3Embedder(EmbeddingModel):
    """Implements `app.engine.model.Embedder` for checkpoints of bge-m3's shape."""

    kinds = Outputs(dense=True, sparse=True, colbert=True, states=True)
    normalizes = True

    def __init__(
        self,
        *,
        name: str,
        backbone: Backbone,
        tokenizer: TextTokenizer,
        sparse_head: nn.Linear,
        colbert_head: nn.Linear,
        pooling: str,
        prompts: Mapping[str, str],
    ) -> None:
        super().__init__(name, backbone, tokenizer)
        self.prompts = prompts
        sparse_head = sparse_head.to(backbone.device, backbone.dtype)
        self._colbert_head = colbert_head.to(backbone.device, backbone.dtype)
        self.pooling = pooling
        # Each is called with the states `[R, hidden]` of the tokens that need it.
        self._token_heads: dict[str, Callable[[Tensor], DeviceRows]] = {
            "sparse": partial(heads.token_weights, head=sparse_head),
            "colbert": partial(
                heads.token_vectors, head=self._colbert_head, backend=backbone.backend,
                dtype=backbone.wire_dtype,
            ),
            "states": lambda states: DeviceRows.of(states.float()),
        }  # fmt: skip
        self._vocabulary = heads.LexicalVocabulary(_ids_of(tokenizer, _FRAME_TOKENS))

    @property
    def colbert_width(self) -> int:
        """Numbers in each ColBERT vector."""
        return self._colbert_head.out_features

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[TextEmbedding | InferenceError]]:
        """Implement `DeviceModel`."""
        packed = self._backbone.pack(sequences)
        made = self._run_heads(self._backbone.forward(packed), packed, outputs)
        copied = start_kinds(made)
        return lambda: self._unpack(sequences, copied())

    def _run_heads(
        self, hidden: Tensor, packed: PackedBatch, outputs: Sequence[Outputs]
    ) -> dict[str, tuple[DeviceRows, Spans]]:
        """Each requested kind, of the sequences that request it, and the rows of each sequence."""
        made: dict[str, tuple[DeviceRows, Spans]] = {}
        if any(wanted := [each.dense for each in outputs]):
            places, spans = select_sequences(packed, wanted)
            backend = self._backbone.backend
            dense = heads.dense_vectors(backend, hidden, packed, self.pooling, places)
            made["dense"] = dense, spans

        @cache
        def select(requested: tuple[bool, ...]) -> tuple[Tensor, Spans]:
            """Gather the states of the same tokens only once."""
            tokens = self._backbone.select_tokens(packed, requested)
            return tokens.rows(hidden), tokens.spans

        for kind, head in self._token_heads.items():
            if any(requested := tuple(getattr(each, kind) for each in outputs)):
                states, spans = select(requested)
                made[kind] = head(states), spans
        return made

    def _unpack(
        self, sequences: list[TokenIds], kinds: dict[str, KindRows]
    ) -> list[TextEmbedding | InferenceError]:
        dense, colbert, states = (kinds.get(kind) for kind in ("dense", "colbert", "states"))
        sparse = self._sparse(sequences, kinds.get("sparse"))
        return [
            TextEmbedding(
                dense=_only_row(dense, index),
                sparse=sparse.get(index),
                # The first token's state is for the dense vector alone.
                colbert=None if colbert is None else colbert.of(index, skip=1),
                states=None if states is None else states.of(index),
            )
            if all(kind.finite(index) for kind in kinds.values())
            else not_finite()
            for index in range(len(sequences))
        ]

    def _sparse(self, sequences: list[TokenIds], kind: KindRows | None) -> dict[int, SparseVector]:
        """The sparse vectors, by the index of the sequences that request them."""
        if kind is None:
            return {}
        weights = {
            index: rows for index in range(len(sequences)) if (rows := kind.of(index)) is not None
        }
        vectors = self._vocabulary.sparse_vectors(
            [sequences[index] for index in weights], list(weights.values())
        )
        return dict(zip(weights, vectors, strict=True))


def load_m3_embedder(name: str, folder: Path, max_length: int, target: Target) -> M3Embedder:
    """Load a checkpoint of bge-m3's shape; raise `StartupError` for whatever is wrong with it."""
    tokenizer = load_tokenizer(folder, max_length)
    backbone = load_encoder(folder, target, tokenizer)
    return M3Embedder(
        name=name,
        backbone=backbone,
        tokenizer=tokenizer,
        sparse_head=read_linear(folder / _SPARSE_HEAD, backbone.hidden_size, 1),
        colbert_head=read_linear(folder / _COLBERT_HEAD, backbone.hidden_size),
        pooling=read_pooling(folder),
        prompts=read_prompts(folder),
    )


def _ids_of(tokenizer: TextTokenizer, tokens: tuple[str, ...]) -> TokenIds:
    ids = map(tokenizer.token_id, tokens)
    return ids_of([token_id for token_id in ids if token_id is not None])


def _only_row(kind: KindRows | None, index: int) -> FloatArray | None:
    rows = None if kind is None else kind.of(index)
    return None if rows is None else rows[0]
