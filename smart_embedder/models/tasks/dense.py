"""Embedders of whole texts: any encoder with pooling, and models of bge-m3's kind.

The former make dense vectors alone, by pooling, then projections and scaling to unit length. The
latter make lexical weights and ColBERT vectors of the same states as well, by a head for each.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from smart_embedder.engine.records import Outputs
from smart_embedder.errors import StartupError
from smart_embedder.models.batch import Indices, PackedBatch, to_device
from smart_embedder.models.checkpoint.config import (
    NO_OVERRIDES,
    SentenceOverrides,
    TextOptions,
    has_modules,
    read_config,
    read_pooling,
    read_prompts,
)
from smart_embedder.models.checkpoint.weights import read_linear
from smart_embedder.models.device.transfer import DeviceRows
from smart_embedder.models.families.load import (
    is_qwen3,
    load_backbone,
    load_encoder,
    load_tokenizer,
)
from smart_embedder.models.ops.backend import Backend
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks.base import HeadsEmbedder, token_states, token_vectors
from smart_embedder.models.tasks.pooling import (
    DenseLayer,
    SentenceConfig,
    Step,
    Truncation,
    mean,
    normalize,
    pool,
)
from smart_embedder.models.tasks.qwen3 import DEFAULT_INSTRUCTION
from smart_embedder.models.text.tokenizer import TextTokenizer

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


class DenseEmbedder(HeadsEmbedder):
    """Implements `smart_embedder.engine.model.Embedder` for dense vectors alone."""

    kinds = Outputs(dense=True, states=True)

    def __init__(
        self,
        name: str,
        folder: Path,
        max_length: int,
        target: Target,
        overrides: SentenceOverrides = NO_OVERRIDES,
    ) -> None:
        """Load any encoder, with pooling and scaling by `overrides` or else by its configuration.

        Raises `StartupError` for whatever is wrong with the folder.
        """
        config, decoder = SentenceConfig.read(folder), is_qwen3(folder)
        if overrides.pooling is not None:
            config = replace(config, poolings=(overrides.pooling,))
        if not (config.poolings or decoder):
            _require_encoder(folder)
            config = replace(config, poolings=(_DEFAULT_POOLING,))
        # Early revisions of the published tokenizer left this to whoever called it.
        closing = QWEN_END if decoder and _PUBLISHED in name.lower() else None
        texts = TextOptions.read(folder)
        backbone, tokenizer = load_backbone(folder, target, max_length, texts, closing=closing)
        if decoder:
            config = _of_qwen3(folder, config, tokenizer)
            self.min_dimensions = _QWEN_MIN_DIMENSIONS
        if overrides.normalize is not None:
            config = replace(config, steps=_scaled(config.steps, unit_length=overrides.normalize))
        super().__init__(name, backbone, tokenizer, config.prompts, config.default_prompt)
        width = backbone.hidden_size * len(config.poolings)
        for step in config.steps:
            if isinstance(step, DenseLayer):
                step.to(backbone.device, torch.float32)
                width = step.require_width(width)
            elif isinstance(step, Truncation):
                width = min(width, step.width)
        self.dense_width = width
        self._dense_head = partial(pooled_vectors, config.poolings, config.steps)
        self._token_heads = {"states": token_states}
        self.normalizes = config.steps[-1:] == (normalize,)
        self.pooling = "+".join(config.poolings)


def _of_qwen3(folder: Path, config: SentenceConfig, tokenizer: TextTokenizer) -> SentenceConfig:
    """As it is published, if without modules; only requests scale its states to unit length."""
    _, after = tokenizer.special_tokens
    is_copy = not has_modules(folder) and bool(after) and after[-1].string == QWEN_END
    if not (config.poolings or is_copy):
        _require_encoder(folder)
    return replace(
        config,
        poolings=config.poolings or ("last_token" if is_copy else _DEFAULT_POOLING,),
        steps=_scaled(config.steps, unit_length=False),
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


def _scaled(steps: tuple[Step, ...], *, unit_length: bool) -> tuple[Step, ...]:
    """The steps, with scaling to unit length as their last one or without it there."""
    before = steps[:-1] if steps[-1:] == (normalize,) else steps
    return (*before, normalize) if unit_length else before


class M3Embedder(HeadsEmbedder):
    """Implements `smart_embedder.engine.model.Embedder` for checkpoints of bge-m3's shape."""

    kinds = Outputs(dense=True, sparse=True, colbert=True, states=True)
    normalizes = True

    def __init__(self, name: str, folder: Path, max_length: int, target: Target) -> None:
        """Load it; raises `StartupError` for whatever is wrong with the folder."""
        tokenizer = load_tokenizer(folder, max_length)
        backbone = load_encoder(folder, target, tokenizer)
        width, device, dtype = backbone.hidden_size, backbone.device, backbone.dtype
        sparse_head = read_linear(folder / _SPARSE_HEAD, width, 1).to(device, dtype)
        colbert_head = read_linear(folder / _COLBERT_HEAD, width).to(device, dtype)
        self.pooling = read_pooling(folder)
        super().__init__(name, backbone, tokenizer, read_prompts(folder))
        self._dense_head = partial(dense_vectors, backbone.backend, self.pooling)
        self._token_heads = {
            "sparse": partial(token_weights, sparse_head),
            "colbert": partial(token_vectors, colbert_head, backbone),
            "states": token_states,
        }
        without_weight = map(tokenizer.token_id, _WITHOUT_WEIGHT)
        self._without_weight = np.array([i for i in without_weight if i is not None], np.int64)
        self.colbert_width = colbert_head.out_features


def pooled_vectors(
    poolings: Sequence[str],
    steps: Sequence[Callable[[Tensor], Tensor]],
    hidden: Tensor,
    packed: PackedBatch,
    sequences: Indices,
) -> DeviceRows:
    """`[S, width]` float32 by `poolings`, then `steps` from vectors to vectors."""
    vectors = pool(hidden, packed, poolings, sequences)
    for step in steps:
        vectors = step(vectors)
    return DeviceRows.of(vectors)


def dense_vectors(
    backend: Backend, pooling: str, hidden: Tensor, packed: PackedBatch, sequences: Indices
) -> DeviceRows:
    """`[S, hidden]` float32 of unit length: one for each of the `sequences`, packed indices."""
    if pooling == "cls":
        first = to_device(hidden.device, packed.offsets[sequences])
        return DeviceRows(*backend.unit_rows(hidden, torch.float32, first))
    chosen = to_device(hidden.device, sequences)
    return DeviceRows(*backend.unit_rows(mean(hidden, packed), torch.float32, chosen))


def token_weights(head: nn.Linear, states: Tensor) -> DeviceRows:
    """`[R]`: the lexical weight of each token with states `[R, hidden]`, if it is above 0."""
    return DeviceRows.of(head(states).squeeze(-1))
