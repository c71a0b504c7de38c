"""Embedders of whole texts: any encoder with pooling, and models of bge-m3's kind.

The former make dense vectors alone, by pooling, then projections and scaling to unit length. The
latter make lexical weights and ColBERT vectors of the same states as well, by a head for each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from smart_embedder.engine.records import FloatArray, Outputs, SparseVector, TokenIds
from smart_embedder.errors import StartupError
from smart_embedder.models.batch.blocks import Indices, to_device
from smart_embedder.models.batch.packing import PackedBatch
from smart_embedder.models.checkpoint.config import (
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
from smart_embedder.models.checkpoint.weights import read_linear
from smart_embedder.models.device.transfer import DeviceRows
from smart_embedder.models.families.backbone import Backbone, Target
from smart_embedder.models.families.load import (
    is_qwen3,
    load_backbone,
    load_encoder,
    load_tokenizer,
)
from smart_embedder.models.ops.backend import Backend
from smart_embedder.models.tasks.base import HeadsEmbedder, KindRows, token_states, token_vectors
from smart_embedder.models.tasks.pooling import load_steps, mean, pool
from smart_embedder.models.tasks.qwen3 import DEFAULT_INSTRUCTION
from smart_embedder.models.text.tokenizer import TextTokenizer, ids_of

# As sentence-transformers does for a folder without a configuration.
_DEFAULT_POOLING = "mean"
# In the names of the published models, whose texts end in one such token.
_PUBLISHED = "qwen3-embedding"
QWEN_END = "<|endoftext|>"
_QWEN_MIN_DIMENSIONS = 32
# Those of Qwen3-Embedding's own configuration, for a copy of the model without it.
_QWEN_PROMPTS = {"query": f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:", "document": ""}
# Those of bge-m3, by their files.
HEADS = _SPARSE_HEAD, _COLBERT_HEAD = "sparse_linear.pt", "colbert_linear.pt"
# Tokens without a lexical weight: special, padding and unknown ones.
_WITHOUT_WEIGHT = ("<s>", "</s>", "<pad>", "<unk>", "[CLS]", "[SEP]", "[PAD]", "[UNK]")


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
    """Implements `smart_embedder.engine.model.Embedder` for dense vectors alone."""

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


class M3Embedder(HeadsEmbedder):
    """Implements `smart_embedder.engine.model.Embedder` for checkpoints of bge-m3's shape."""

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
            dense_head=partial(dense_vectors, backbone.backend, pooling),
            token_heads={
                "sparse": partial(token_weights, sparse_head),
                "colbert": partial(token_vectors, colbert_head, backbone),
                "states": token_states,
            },
        )  # fmt: skip
        self.pooling = pooling
        self.colbert_width = colbert_head.out_features
        without_weight = map(tokenizer.token_id, _WITHOUT_WEIGHT)
        self._without_weight = ids_of([each for each in without_weight if each is not None])

    def _sparse_vectors(
        self, sequences: list[TokenIds], weights: KindRows | None
    ) -> dict[int, SparseVector]:
        if weights is None:
            return {}
        rows = {
            index: each
            for index in range(len(sequences))
            if (each := weights.of(index)) is not None
        }
        asking = [sequences[index] for index in rows]
        vectors = sparse_vectors(asking, list(rows.values()), self._without_weight)
        return dict(zip(rows, vectors, strict=True))


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


def dense_vectors(
    backend: Backend, pooling: str, hidden: Tensor, packed: PackedBatch, sequences: Indices
) -> DeviceRows:
    """`[S, hidden]` float32 of unit length: one for each of the `sequences`, packed indices."""
    if pooling == "cls":
        first = to_device(packed.device, packed.offsets[sequences])
        return DeviceRows(*backend.unit_rows(hidden, torch.float32, first))
    chosen = to_device(packed.device, sequences)
    return DeviceRows(*backend.unit_rows(mean(hidden, packed), torch.float32, chosen))


def token_weights(head: nn.Linear, states: Tensor) -> DeviceRows:
    """`[R]`: the lexical weight of each token with states `[R, hidden]`, if it is above 0."""
    return DeviceRows.of(head(states).squeeze(-1))


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
