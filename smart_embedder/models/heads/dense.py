"""Dense vectors of any encoder: by pooling, then projections and scaling to unit length."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from smart_embedder.errors import StartupError
from smart_embedder.hardware.transfer import DeviceRows
from smart_embedder.kernels.packed_batch import Indices, PackedBatch
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.registry import is_qwen3, load_backbone
from smart_embedder.models.files.config import (
    NO_OVERRIDES,
    SentenceOverrides,
    TextOptions,
    has_modules,
    read_config,
)
from smart_embedder.models.heads.embedder import HeadsEmbedder
from smart_embedder.models.heads.pooling import (
    ENDS,
    DenseLayer,
    DimensionTruncation,
    SentenceConfig,
    Step,
    normalize,
    pool,
    steps_of,
)
from smart_embedder.models.runner import Made
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.requests import Outputs

# As sentence-transformers does for a folder without a configuration.
_DEFAULT_POOLING = "mean"
# In the names of the published models, whose texts end in one such token.
_PUBLISHED = "qwen3-embedding"
QWEN_END = "<|endoftext|>"
_QWEN_MIN_DIMENSIONS = 32
# What Qwen3 does with a query.
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Those of Qwen3-Embedding's own configuration, for a copy of the model without it.
_QWEN_PROMPTS = {"query": f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:", "document": ""}


class DenseEmbedder(HeadsEmbedder):
    """Implements `smart_embedder.interface.Embedder` for dense vectors alone."""

    kinds = Outputs(dense=True)

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
                backbone.place_head(step, torch.float32)
                width = step.require_width(width)
            elif isinstance(step, DimensionTruncation):
                width = min(width, step.width)
        self.dense_width = width
        self._dense_head = partial(pooled_vectors, config.poolings, config.steps)
        self.normalizes = config.steps[-1:] == (normalize,)
        self.pooling = "+".join(config.poolings)
        self._dense_end = ENDS.get(self.pooling)
        steps = " ".join(
            f"dense {steps_of(each)}"
            if isinstance(each, DenseLayer)
            # The function that scales, or a truncation with its width.
            else getattr(each, "__name__", repr(each))
            for each in config.steps
        )
        self._made = {"dense": Made(self.pooling, width, self.normalizes, steps=steps)}


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
