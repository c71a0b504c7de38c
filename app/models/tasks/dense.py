"""Dense vectors of any encoder: pooling, then projections and scaling to unit length."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from app.engine.records import Outputs, SparseVector, TokenIds
from app.errors import StartupError
from app.models.batch.blocks import Indices
from app.models.batch.packing import PackedBatch
from app.models.checkpoint.config import (
    NO_OVERRIDES,
    Normalization,
    SentenceConfig,
    SentenceOverrides,
    Step,
    TextOptions,
    has_modules,
    read_config,
    read_pooling,
    read_prompts,
)
from app.models.checkpoint.weights import read_linear
from app.models.device.transfer import DeviceRows
from app.models.families.backbone import Backbone, Target
from app.models.families.load import is_qwen3, load_backbone, load_encoder, load_tokenizer
from app.models.tasks import base
from app.models.tasks.base import HeadsEmbedder, KindRows, token_states
from app.models.tasks.pooling import load_steps, pool
from app.models.tasks.qwen3 import DEFAULT_INSTRUCTION
from app.models.text.tokenizer import TextTokenizer, ids_of

# As sentence-transformers does for a folder without a configuration.
_DEFAULT_POOLING = "mean"
# In the names of the published models, whose texts end in one such token.
_PUBLISHED = "qwen3-embedding"
QWEN_END = "<|endoftext|>"
_QWEN_MIN_DIMENSIONS = 32
# Those of Qwen3-Embedding's own configuration, for a copy of the model without it.
_QWEN_PROMPTS = {"query": f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:", "document": ""}


@dataclass(frozen=True, slots=True)
class PooledVectors:
    """Makes the dense vectors: `poolings`, then `steps`, from vectors to vectors, in float32."""

    poolings: Sequence[str]
    steps: Sequence[Callable[[Tensor], Tensor]]

    def __call__(self, hidden: Tensor, packed: PackedBatch, sequences: Indices) -> DeviceRows:
        """Implement `SequenceHead`."""
        vectors = pool(hidden, packed, self.poolings, sequences)
        for step in self.steps:
            vectors = step(vectors)
        return DeviceRows.of(vectors)


class DenseEmbedder(HeadsEmbedder):
    """Implements `app.engine.model.Embedder` for dense vectors alone."""

    kinds = Outputs(dense=True, states=True)

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        tokenizer: TextTokenizer,
        config: SentenceConfig,
        *,
        min_dimensions: int | None = None,
    ) -> None:
        width = backbone.hidden_size * len(config.poolings)
        steps, self._width = load_steps(config.steps, width, backbone.device)
        super().__init__(
            name, backbone, tokenizer, config.prompts,
            dense_head=PooledVectors(config.poolings, steps),
            token_heads={"states": token_states},
        )  # fmt: skip
        self.default_prompt = config.default_prompt
        self.min_dimensions = min_dimensions
        self.normalizes = bool(config.steps) and isinstance(config.steps[-1], Normalization)
        self.pooling = "+".join(config.poolings)

    @property
    def dense_width(self) -> int:
        """Numbers in a dense vector."""
        return self._width


def load_dense_embedder(
    name: str,
    folder: Path,
    max_length: int,
    target: Target,
    overrides: SentenceOverrides = NO_OVERRIDES,
) -> DenseEmbedder:
    """Load any encoder, with pooling and scaling by `overrides` or else by its configuration.

    Raises `StartupError` for whatever is wrong with the folder.
    """
    config, decoder = SentenceConfig.read(folder), is_qwen3(folder)
    if overrides.pooling is not None:
        config = replace(config, poolings=(overrides.pooling,))
    if not (config.poolings or decoder):
        _require_encoder(folder)
        config = replace(config, poolings=(_DEFAULT_POOLING,))
    backbone, tokenizer = load_backbone(
        folder,
        target,
        max_length,
        TextOptions.read(folder),
        # Early revisions of the published tokenizer left this to whoever called it.
        closing=QWEN_END if decoder and _PUBLISHED in name.lower() else None,
    )
    if decoder:
        config = _of_qwen3(folder, config, tokenizer)
    if overrides.normalize is not None:
        config = replace(config, steps=_scaled(config.steps, overrides.normalize))
    fewest = _QWEN_MIN_DIMENSIONS if decoder else None
    return DenseEmbedder(name, backbone, tokenizer, config, min_dimensions=fewest)


def _of_qwen3(folder: Path, config: SentenceConfig, tokenizer: TextTokenizer) -> SentenceConfig:
    """Its raw states are given where a request does not ask for unit length.

    A folder without modules whose texts end as Qwen3-Embedding's is a copy of it.
    """
    _, after = tokenizer.special_tokens
    is_copy = not has_modules(folder) and bool(after) and after[-1].string == QWEN_END
    if not (config.poolings or is_copy):
        _require_encoder(folder)
    return replace(
        config,
        poolings=config.poolings or ("last_token" if is_copy else _DEFAULT_POOLING,),
        steps=_scaled(config.steps, normalize=False),
        prompts=config.prompts or (_QWEN_PROMPTS if is_copy else {}),
    )


def _require_encoder(folder: Path) -> None:
    """Raise `StartupError` for what was trained for something else, as far as the folder tells."""
    named = read_config(folder).get("architectures") or [""]
    if has_modules(folder):
        return
    if str(named[0]).endswith("ForSequenceClassification"):
        raise StartupError(f"{folder} holds a classifier: name it in RERANKER_MODEL")
    if str(named[0]).endswith(("ForCausalLM", "LMHeadModel")):
        raise StartupError(
            f"{folder} holds a language model, and nothing says how vectors are made of its "
            "states: set POOLING"
        )


def _scaled(steps: tuple[Step, ...], normalize: bool) -> tuple[Step, ...]:
    """The steps, with scaling to unit length as their last one or without it there."""
    scales = bool(steps) and isinstance(steps[-1], Normalization)
    before = steps[:-1] if scales else steps
    return (*before, Normalization()) if normalize else before


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
            dense_head=partial(base.dense_vectors, backbone.backend, pooling),
            token_heads={
                "sparse": partial(base.token_weights, sparse_head),
                "colbert": partial(base.token_vectors, colbert_head, backbone),
                "states": base.token_states,
            },
        )  # fmt: skip
        self.pooling = pooling
        self.colbert_width = colbert_head.out_features
        self._vocabulary = base.LexicalVocabulary(_ids_of(tokenizer, _FRAME_TOKENS))

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
