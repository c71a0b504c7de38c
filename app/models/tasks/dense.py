"""Dense vectors of any encoder: pooling, then projections and scaling to unit length."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from app.engine.types import FloatArray, Outputs, TextEmbedding, TokenIds
from app.errors import InferenceError, StartupError
from app.models.backbone import Backbone
from app.models.batch.selection import Spans, select_sequences
from app.models.checkpoint.config import read_config
from app.models.checkpoint.sentence_config import Normalization, SentenceConfig, has_modules
from app.models.device.transfer import DeviceRows, not_finite
from app.models.families import is_qwen3, load_backbone
from app.models.target import Target
from app.models.tasks.device_model import EmbeddingModel
from app.models.tasks.kind_rows import KindRows, start_kinds
from app.models.tasks.pooling import pool
from app.models.tasks.projection import load_steps
from app.models.text.qwen_prompt import DEFAULT_INSTRUCTION
from app.models.text.tokenizer import TextTokenizer

# As sentence-transformers does for a folder without a configuration.
_DEFAULT_POOLING = "mean"
QWEN_END = "<|endoftext|>"
_QWEN_MIN_DIMENSIONS = 32
# Those of Qwen3-Embedding's own configuration, for a copy of the model without it.
_QWEN_PROMPTS = {"query": f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:", "document": ""}


class DenseEmbedder(EmbeddingModel):
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
        super().__init__(name, backbone, tokenizer)
        self.prompts, self.default_prompt = config.prompts, config.default_prompt
        self.min_dimensions = min_dimensions
        self.normalizes = bool(config.steps) and isinstance(config.steps[-1], Normalization)
        self.pooling = "+".join(config.poolings)
        self._poolings = config.poolings
        width = backbone.hidden_size * len(config.poolings)
        self._steps, self._width = load_steps(config.steps, width, backbone.device)

    @property
    def dense_width(self) -> int:
        """Numbers in a dense vector."""
        return self._width

    def finish_loading(self) -> None:
        """Implement `DeviceModel`; a decoder's token embedding stays mapped from its file."""
        if not self._backbone.shares_prefixes:
            self._backbone.finish_loading()

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[TextEmbedding | InferenceError]]:
        """Implement `DeviceModel`: vectors in float32, scaled as the model's configuration says."""
        packed = self._backbone.pack(sequences)
        hidden = self._backbone.forward(packed)
        made: dict[str, tuple[DeviceRows, Spans]] = {}
        if any(wanted := [each.dense for each in outputs]):
            places, spans = select_sequences(packed, wanted)
            vectors = self._finish(pool(hidden, packed, self._poolings, places))
            made["dense"] = DeviceRows.of(vectors), spans
        if any(wanted := [each.states for each in outputs]):
            tokens = self._backbone.select_tokens(packed, wanted)
            made["states"] = DeviceRows.of(tokens.rows(hidden).float()), tokens.spans
        copied = start_kinds(made)

        def collect() -> list[TextEmbedding | InferenceError]:
            kinds = copied()
            return [_embedding(index, kinds) for index in range(len(sequences))]

        return collect

    def _finish(self, vectors: Tensor) -> Tensor:
        for step in self._steps:
            vectors = step(vectors)
        return vectors


def _embedding(index: int, kinds: dict[str, KindRows]) -> TextEmbedding | InferenceError:
    if not all(kind.finite(index) for kind in kinds.values()):
        return not_finite()
    rows = {name: kind.of(index) for name, kind in kinds.items()}
    dense: FloatArray | None = rows.get("dense")
    return TextEmbedding(dense=None if dense is None else dense[0], states=rows.get("states"))


def load_dense_embedder(
    name: str, folder: Path, max_length: int, target: Target, *, pooling: str | None = None
) -> DenseEmbedder:
    """Load any encoder; `pooling` takes the place of what its configuration says.

    Raises `StartupError` for whatever is wrong with the folder.
    """
    config = _with_pooling(folder, SentenceConfig.read(folder), pooling)
    limit = min(max_length, config.max_length or max_length)
    backbone, tokenizer = load_backbone(
        folder,
        target,
        limit,
        lower_case=config.lower_case,
        closing=QWEN_END if is_qwen3(folder) else None,
    )
    fewest = _QWEN_MIN_DIMENSIONS if is_qwen3(folder) else None
    return DenseEmbedder(name, backbone, tokenizer, config, min_dimensions=fewest)


def _with_pooling(folder: Path, config: SentenceConfig, pooling: str | None) -> SentenceConfig:
    if is_qwen3(folder):
        return _of_qwen3(config, pooling)
    if pooling is not None:
        return replace(config, poolings=(pooling,))
    if config.poolings:
        return config
    _require_encoder(folder)
    return replace(config, poolings=(_DEFAULT_POOLING,))


def _of_qwen3(config: SentenceConfig, pooling: str | None) -> SentenceConfig:
    """Its raw states are given where a request does not ask for unit length."""
    last = config.steps[-1:]
    scaled = bool(last) and isinstance(last[0], Normalization)
    return replace(
        config,
        poolings=(pooling,) if pooling else config.poolings or ("last_token",),
        steps=config.steps[:-1] if scaled else config.steps,
        prompts=config.prompts or _QWEN_PROMPTS,
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
