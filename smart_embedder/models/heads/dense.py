"""Dense vectors of any encoder: pooling, then projections and scaling to unit length."""

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
    describe_layers,
    normalize,
    pool,
)
from smart_embedder.models.runner import OutputSpec
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.requests import Outputs

# The default of sentence-transformers for a folder without a configuration.
_DEFAULT_POOLING = "mean"
# A part of the names of the published models, whose texts end in one `QWEN_END`.
_PUBLISHED = "qwen3-embedding"
QWEN_END = "<|endoftext|>"
_QWEN_MIN_DIMENSIONS = 32
# The instruction of Qwen3's models for a query.
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompts in Qwen3-Embedding's configuration, for a copy of the model without it.
_QWEN_PROMPTS = {"query": f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:", "document": ""}


class DenseEmbedder(HeadsEmbedder):
    """Implements `smart_embedder.interface.Embedder` for dense vectors only."""

    kinds = Outputs(dense=True)

    def __init__(
        self,
        name: str,
        folder: Path,
        max_length: int,
        target: Target,
        overrides: SentenceOverrides = NO_OVERRIDES,
    ) -> None:
        """Load any encoder; `overrides` replace the pooling and scaling of its configuration.

        Raises `StartupError` if the folder cannot be used.
        """
        config, is_decoder = SentenceConfig.read(folder), is_qwen3(folder)
        if overrides.pooling is not None:
            config = replace(config, poolings=(overrides.pooling,))
        if not (config.poolings or is_decoder):
            _require_encoder(folder)
            config = replace(config, poolings=(_DEFAULT_POOLING,))
        # Early revisions of the published tokenizer did not append the token themselves.
        closing = QWEN_END if is_decoder and _PUBLISHED in name.lower() else None
        texts = TextOptions.read(folder)
        backbone, tokenizer = load_backbone(folder, target, max_length, texts, closing=closing)
        if is_decoder:
            config = _complete_qwen3_config(folder, config, tokenizer)
            self.min_dimensions = _QWEN_MIN_DIMENSIONS
        if overrides.normalize is not None:
            steps = _set_normalize(config.steps, enabled=overrides.normalize)
            config = replace(config, steps=steps)
        super().__init__(name, backbone, tokenizer, config.prompts, config.default_prompt)
        width = backbone.hidden_size * len(config.poolings)
        for step in config.steps:
            if isinstance(step, DenseLayer):
                backbone.place_head(step, torch.float32)
                width = step.require_width(width)
            elif isinstance(step, DimensionTruncation):
                width = min(width, step.width)
        self.dense_width = width
        self._dense_head = partial(compute_pooled_vectors, config.poolings, config.steps)
        self.normalizes = config.steps[-1:] == (normalize,)
        self.pooling = "+".join(config.poolings)
        self._dense_end = ENDS.get(self.pooling)
        described = " ".join(
            f"dense {describe_layers(step)}"
            if isinstance(step, DenseLayer)
            # `normalize`, or a `DimensionTruncation`: their names are part of vector space ids.
            else getattr(step, "__name__", repr(step))
            for step in config.steps
        )
        self._output_specs = {
            "dense": OutputSpec(self.pooling, width, self.normalizes, steps=described)
        }


def _complete_qwen3_config(
    folder: Path, config: SentenceConfig, tokenizer: TextTokenizer
) -> SentenceConfig:
    """Add what a copy of Qwen3-Embedding without modules lacks, and drop the last `normalize`.

    Qwen3's vectors are scaled to unit length only where a request asks for it.
    """
    _, after = tokenizer.special_tokens
    is_copy = not has_modules(folder) and bool(after) and after[-1].string == QWEN_END
    if not (config.poolings or is_copy):
        _require_encoder(folder)
    return replace(
        config,
        poolings=config.poolings or ("last_token" if is_copy else _DEFAULT_POOLING,),
        steps=_set_normalize(config.steps, enabled=False),
        prompts=config.prompts or (_QWEN_PROMPTS if is_copy else {}),
    )


def _require_encoder(folder: Path) -> None:
    """Raise `StartupError` if the folder says that its model was trained for another task."""
    named = read_config(folder).get("architectures") or [""]
    if has_modules(folder):
        return
    if str(named[0]).endswith("ForSequenceClassification"):
        raise StartupError(f"{folder} holds a classifier: name it in RERANKER_MODEL")
    if str(named[0]).endswith(("ForCausalLM", "LMHeadModel")):
        raise StartupError(
            f"{folder} holds a language model, and no configuration says how its vectors are "
            "pooled: set POOLING"
        )


def _set_normalize(steps: tuple[Step, ...], *, enabled: bool) -> tuple[Step, ...]:
    """Return the steps with `normalize` as the last one, or without it there."""
    before = steps[:-1] if steps[-1:] == (normalize,) else steps
    return (*before, normalize) if enabled else before


def compute_pooled_vectors(
    poolings: Sequence[str],
    steps: Sequence[Callable[[Tensor], Tensor]],
    hidden: Tensor,
    packed: PackedBatch,
    sequences: Indices,
) -> DeviceRows:
    """Compute `[S, width]` float32 by `poolings`, then by `steps` from vectors to vectors."""
    vectors = pool(hidden, packed, poolings, sequences)
    for step in steps:
        vectors = step(vectors)
    return DeviceRows.of(vectors)
