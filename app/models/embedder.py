"""bge-m3, and any checkpoint of its shape: one packed forward, three kinds of vectors."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from app.jobs import FloatArray, Outputs, SparseVector, TextEmbedding, TokenIds, TokenizedText
from app.models import heads
from app.models.backbone import Backbone, Target, load_encoder, load_tokenizer
from app.models.checkpoint import read_linear, read_pooling
from app.models.device_model import DeviceModel
from app.models.packing import PackedBatch
from app.models.tokenizer import TextTokenizer
from app.models.transfer import start_copies

_FRAME_TOKENS = ("<s>", "</s>", "<pad>", "<unk>", "[CLS]", "[SEP]", "[PAD]", "[UNK]")


@dataclass(frozen=True, slots=True)
class _Vectors:
    """What the device computed for a packed batch, on the host; None where not asked for."""

    dense: FloatArray | None = None
    token_weights: FloatArray | None = None
    token_vectors: FloatArray | None = None


class M3Embedder(DeviceModel[TextEmbedding]):
    """Implements `app.jobs.Embedder` for checkpoints of bge-m3's shape."""

    max_batch_sequences = None

    def __init__(
        self,
        *,
        name: str,
        backbone: Backbone,
        tokenizer: TextTokenizer,
        sparse_head: nn.Linear,
        colbert_head: nn.Linear,
        pooling: str,
    ) -> None:
        self.name = name
        self._backbone = backbone
        self._tokenizer = tokenizer
        self._sparse_head = sparse_head.to(backbone.device, backbone.dtype)
        self._colbert_head = colbert_head.to(backbone.device, backbone.dtype)
        self._pooling = pooling
        self._vocabulary = heads.LexicalVocabulary(_ids_of(tokenizer, _FRAME_TOKENS))

    @property
    def max_length(self) -> int:
        """The most tokens of one text, special tokens included."""
        return self._tokenizer.max_length

    @property
    def colbert_width(self) -> int:
        """Numbers in each ColBERT vector."""
        return self._colbert_head.out_features

    def tokenize(self, texts: list[str]) -> list[TokenizedText]:
        """Token ids of each text, cut from the end to `max_length`."""
        return self._tokenizer.encode(texts)

    def settle(self) -> None:
        """Implement `DeviceModel`."""
        self._backbone.settle()

    def shallow(self) -> tuple["M3Embedder", float]:
        """One of fewer layers, for measuring only, and how many times as deep this one is."""
        part = copy(self)
        part._backbone, times = self._backbone.shallow()  # noqa: SLF001 - its own
        return part, times

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Outputs
    ) -> Callable[[], list[TextEmbedding]]:
        """Implement `DeviceModel`."""
        packed = self._backbone.pack(sequences)
        arrive = self._run_heads(self._backbone.forward(packed), packed, outputs)
        return lambda: self._unpack(sequences, packed, arrive())

    def _run_heads(
        self, hidden: Tensor, packed: PackedBatch, outputs: Outputs
    ) -> Callable[[], _Vectors]:
        kinds: dict[str, Tensor] = {}
        if outputs.dense:
            kinds["dense"] = heads.dense_vectors(hidden, packed, self._pooling)
        if outputs.sparse:
            kinds["token_weights"] = heads.token_weights(hidden, self._sparse_head)
        if outputs.colbert:
            kinds["token_vectors"] = heads.token_vectors(hidden, self._colbert_head)
        arrive = start_copies(list(kinds.values()))
        return lambda: _Vectors(**dict(zip(kinds, arrive(), strict=True)))

    def _unpack(
        self, sequences: list[TokenIds], packed: PackedBatch, vectors: _Vectors
    ) -> list[TextEmbedding]:
        spans = [slice(*packed.offsets[place : place + 2]) for place in packed.unpack_order]
        sparse = self._sparse(sequences, spans, vectors.token_weights)
        return [
            TextEmbedding(
                dense=None if vectors.dense is None else vectors.dense[place],
                sparse=None if sparse is None else sparse[index],
                colbert=_without_first(vectors.token_vectors, spans[index]),
            )
            for index, place in enumerate(packed.unpack_order)
        ]

    def _sparse(
        self, sequences: list[TokenIds], spans: list[slice], weights: FloatArray | None
    ) -> list[SparseVector] | None:
        if weights is None:
            return None
        return self._vocabulary.sparse_vectors(sequences, [weights[span] for span in spans])


def load_m3_embedder(name: str, folder: Path, max_length: int, target: Target) -> M3Embedder:
    """Load a checkpoint of bge-m3's shape; raise `StartupError` for whatever is wrong with it."""
    tokenizer = load_tokenizer(folder, max_length)
    backbone = load_encoder(folder, target, tokenizer)
    return M3Embedder(
        name=name,
        backbone=backbone,
        tokenizer=tokenizer,
        sparse_head=read_linear(folder / "sparse_linear.pt", backbone.hidden_size, 1),
        colbert_head=read_linear(folder / "colbert_linear.pt", backbone.hidden_size),
        pooling=read_pooling(folder),
    )


def _ids_of(tokenizer: TextTokenizer, tokens: tuple[str, ...]) -> TokenIds:
    ids = [tokenizer.token_id(token) for token in tokens]
    return np.array([token_id for token_id in ids if token_id is not None], dtype=np.int64)


def _without_first(vectors: FloatArray | None, span: slice) -> FloatArray | None:
    return None if vectors is None else vectors[span.start + 1 : span.stop]
