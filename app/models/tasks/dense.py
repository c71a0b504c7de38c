"""Dense vectors of any encoder: pooling, then projections and scaling to unit length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from app.engine.types import Outputs
from app.errors import StartupError
from app.models.backbones.backbone import Backbone
from app.models.backbones.families import is_qwen3, load_backbone
from app.models.batch.arrays import Indices
from app.models.batch.packing import PackedBatch
from app.models.checkpoint.config import read_config
from app.models.checkpoint.sentence_config import (
    NO_OVERRIDES,
    Normalization,
    SentenceConfig,
    SentenceOverrides,
    Step,
    TextOptions,
    has_modules,
)
from app.models.device.transfer import DeviceRows
from app.models.target import Target
from app.models.tasks.heads import token_states
from app.models.tasks.heads_embedder import HeadsEmbedder
from app.models.tasks.pooling import pool
from app.models.tasks.projection import load_steps
from app.models.text.qwen_prompt import DEFAULT_INSTRUCTION
from app.models.text.tokenizer import TextTokenizer

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
