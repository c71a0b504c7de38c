"""bge-m3, and any checkpoint of its shape: one packed forward, three kinds of vectors."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import nn

from app.engine.types import Outputs, SparseVector, TokenIds
from app.models.backbones.backbone import Backbone
from app.models.backbones.by_architectures import load_encoder, load_tokenizer
from app.models.checkpoint.sentence_config import read_pooling, read_prompts
from app.models.checkpoint.weights import read_linear
from app.models.target import Target
from app.models.tasks import heads
from app.models.tasks.heads_embedder import HeadsEmbedder, KindRows
from app.models.text.template import ids_of
from app.models.text.tokenizer import TextTokenizer

HEADS = _SPARSE_HEAD, _COLBERT_HEAD = "sparse_linear.pt", "colbert_linear.pt"
_FRAME_TOKENS = ("<s>", "</s>", "<pad>", "<unk>", "[CLS]", "[SEP]", "[PAD]", "[UNK]")


class M3Embedder(HeadsEmbedder):
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
        super().__init__(
            name, backbone, tokenizer, prompts,
            dense_head=partial(heads.dense_vectors, backbone.backend, pooling),
            token_heads={
                "sparse": partial(heads.token_weights, sparse_head),
                "colbert": partial(heads.token_vectors, colbert_head, backbone),
                "states": heads.token_states,
            },
        )  # fmt: skip
        self.pooling = pooling
        self.colbert_width = colbert_head.out_features
        self._vocabulary = heads.LexicalVocabulary(_ids_of(tokenizer, _FRAME_TOKENS))

    def _sparse_vectors(
        self, sequences: list[TokenIds], weights: KindRows | None
    ) -> dict[int, SparseVector]:
        if weights is None:
            return {}
        by_index = {
            index: rows
            for index in range(len(sequences))
            if (rows := weights.of(index)) is not None
        }
        vectors = self._vocabulary.sparse_vectors(
            [sequences[index] for index in by_index], list(by_index.values())
        )
        return dict(zip(by_index, vectors, strict=True))


def load_m3_embedder(name: str, folder: Path, max_length: int, target: Target) -> M3Embedder:
    """Load a checkpoint of bge-m3's shape; raise `StartupError` for whatever is wrong with it."""
    tokenizer = load_tokenizer(folder, max_length)
    backbone = load_encoder(folder, target, tokenizer)
    sparse_head = read_linear(folder / _SPARSE_HEAD, backbone.hidden_size, 1)
    colbert_head = read_linear(folder / _COLBERT_HEAD, backbone.hidden_size)
    return M3Embedder(
        name=name,
        backbone=backbone,
        tokenizer=tokenizer,
        sparse_head=sparse_head.to(backbone.device, backbone.dtype),
        colbert_head=colbert_head.to(backbone.device, backbone.dtype),
        pooling=read_pooling(folder),
        prompts=read_prompts(folder),
    )


def _ids_of(tokenizer: TextTokenizer, tokens: tuple[str, ...]) -> TokenIds:
    ids = map(tokenizer.token_id, tokens)
    return ids_of([token_id for token_id in ids if token_id is not None])
