"""Dense vectors of any encoder: pooling, then projections and scaling to unit length."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
from torch import Tensor

from smart_embedder.errors import StartupError
from smart_embedder.hardware.transfer import DeviceRows
from smart_embedder.kernels.packed_batch import Indices, PackedBatch
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.families.registry import is_qwen3, load_backbone
from smart_embedder.models.files.adapters import CONFIG_FILE
from smart_embedder.models.files.config import (
    NO_OVERRIDES,
    SentenceOverrides,
    TextOptions,
    has_modules,
    is_classifier,
    read_architecture,
    read_config,
    read_integer,
    transformer_folder,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.embedder import (
    HeadsEmbedder,
    compute_token_weights,
    find_tokens_without_weight,
)
from smart_embedder.models.heads.pooling import (
    ENDS,
    SentenceConfig,
    VectorLayer,
    describe_layers,
    normalize,
    place_steps,
    pool,
)
from smart_embedder.models.runner import OutputSpec
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.requests import Outputs

log = structlog.get_logger(__name__)

# The default of sentence-transformers for a folder without a configuration.
_DEFAULT_POOLING = "mean"
# The token that ends each text of Qwen3-Embedding.
QWEN_END = "<|endoftext|>"
_QWEN_MIN_DIMENSIONS = 32
# The projection of a Qwen3 with bidirectional attention, in the checkpoint.
_PROJECTION = "linear.weight"
# The instruction of Qwen3's models for a query.
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompts in Qwen3-Embedding's configuration, also for a copy of the model without it.
_QWEN_PROMPTS = {"query": f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:", "document": ""}


class DenseEmbedder(HeadsEmbedder):
    """Implements `smart_embedder.interface.Embedder` for dense vectors.

    A model like gte-multilingual-base, which has a logit for each token, also makes sparse ones.
    """

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
        config, transformer = SentenceConfig.read(folder), transformer_folder(folder)
        is_decoder = is_qwen3(transformer)
        is_published = is_decoder and is_qwen3_embedding(transformer, config)
        # Early revisions of the published tokenizer did not append the token themselves.
        closing = QWEN_END if is_published else None
        if overrides.pooling is not None:
            config = replace(config, poolings=(overrides.pooling,))
        if not (config.poolings or is_decoder):
            _require_encoder(folder)
        texts, weights = self._read_text_options(transformer), Weights.read(transformer)
        backbone, tokenizer = load_backbone(
            transformer, target, max_length, texts, closing=closing, weights=weights
        )
        config = _complete_config(name, folder, config, tokenizer, is_published=is_published)
        if is_decoder:
            self.min_dimensions = _QWEN_MIN_DIMENSIONS
        if (projection := _read_projection(transformer, weights, config)) is not None:
            config = replace(config, steps=(projection, *config.steps))
        if overrides.normalize is not None:
            config = set_normalize(config, enabled=overrides.normalize)
        self._assemble(name, config, backbone, tokenizer)
        if _weighs_tokens(transformer, weights):
            head = backbone.place_head(weights.linear("classifier", backbone.hidden_size, 1))
            self.kinds = Outputs(dense=True, sparse=True)
            self._token_heads = {"sparse": partial(compute_token_weights, head)}
            self._without_weight = find_tokens_without_weight(tokenizer)
            spec = OutputSpec("max", tokenizer.vocabulary_size, head="classifier.")
            self._output_specs = {**self._output_specs, "sparse": spec}

    def _read_text_options(self, folder: Path) -> TextOptions:
        return TextOptions.read(folder)

    def _assemble(
        self, name: str, config: SentenceConfig, backbone: Backbone, tokenizer: TextTokenizer
    ) -> None:
        """Set the model of a configuration that says how states become vectors."""
        super().__init__(name, backbone, tokenizer, config.prompts, config.default_prompt)
        width = self.dense_width = place_steps(config, backbone)
        self._dense_head = partial(compute_pooled_vectors, config.poolings, config.steps)
        self._steps = config.steps
        self.normalizes = config.steps[-1:] == (normalize,)
        self.similarity = config.similarity
        if self.similarity not in {"cosine", "dot"}:
            log.warning(
                "similarity_not_used",
                model=name,
                detail=f"the model names the similarity {self.similarity}, and late interaction "
                "compares its dense vectors by their cosine",
            )
        self.pooling = "+".join(config.poolings)
        self._dense_end = ENDS.get(self.pooling)
        described = " ".join(
            f"dense {describe_layers(step)}"
            if isinstance(step, VectorLayer)
            # `normalize`, or a `DimensionTruncation`: their names are part of vector space ids.
            else getattr(step, "__name__", repr(step))
            for step in config.steps
        )
        self._output_specs = {
            "dense": OutputSpec(self.pooling, width, self.normalizes, steps=described)
        }


def is_qwen3_embedding(transformer: Path, config: SentenceConfig) -> bool:
    """Return whether a Qwen3 has the configuration with which Qwen3-Embedding was published.

    sentence-transformers saves models that were trained further with another architecture, or as
    adapters.
    """
    if (transformer / CONFIG_FILE).is_file():
        return False
    return (
        read_architecture(transformer) == "Qwen3ForCausalLM"
        and config.poolings == ("last_token",)
        and config.prompts == _QWEN_PROMPTS
    )


def _complete_config(
    name: str,
    folder: Path,
    config: SentenceConfig,
    tokenizer: TextTokenizer,
    *,
    is_published: bool,
) -> SentenceConfig:
    """Add what the folder leaves out, and leave scaling to requests in Qwen3-Embedding."""
    if is_published:
        log.info(
            "vectors_not_normalized",
            model=name,
            detail="Qwen3-Embedding's vectors have unit length where a request or NORMALIZE asks "
            "for it",
        )
        return set_normalize(config, enabled=False)
    _, after = tokenizer.special_tokens
    # A copy of Qwen3-Embedding without its modules.
    if is_qwen3(folder) and not has_modules(folder) and after and after[-1].string == QWEN_END:
        prompts = config.prompts or _QWEN_PROMPTS
        return replace(config, poolings=config.poolings or ("last_token",), prompts=prompts)
    if config.poolings:
        return config
    _require_encoder(folder)
    log.warning(
        "pooling_by_default",
        model=name,
        detail="no modules.json says how the states of a text's tokens become its vector: their "
        "mean is taken; if the model was trained otherwise, set POOLING",
    )
    return replace(config, poolings=(_DEFAULT_POOLING,))


def _read_projection(
    transformer: Path, weights: Weights, config: SentenceConfig
) -> VectorLayer | None:
    """Read the projection of a bidirectional Qwen3, such as voyage-4-nano, if there is one.

    Its own code projects the state of each token. It has no bias, so the pooled vector can be
    projected instead, unless the pooling is `max`.
    """
    options = read_config(transformer)
    is_bidirectional = options.get("use_bidirectional_attention") is True
    if options.get("model_type") != "qwen3" or not is_bidirectional or _PROJECTION not in weights:
        return None
    rows, width = weights.tensors[_PROJECTION].shape
    if len(config.poolings) > 1 or config.poolings == ("max",):
        raise StartupError(
            f"{transformer} projects the states of tokens, and its pooling is "
            f"{'+'.join(config.poolings)}: one pooling other than max is supported"
        )
    rows = read_integer(transformer, options, "num_labels", rows)
    return VectorLayer(weights.linear("linear", width, rows, bias=False), width, rows)


def _weighs_tokens(transformer: Path, weights: Weights) -> bool:
    """Return whether a GTE model has weights of tokens, as gte-multilingual-base."""
    return (
        read_config(transformer).get("model_type") == "gte"
        and "classifier.weight" in weights
        and weights.tensors["classifier.weight"].shape[0] == 1
        and not is_classifier(transformer)
    )


def _require_encoder(folder: Path) -> None:
    """Raise `StartupError` if the folder says that its model was trained for another task."""
    if has_modules(folder):
        return
    if is_classifier(folder):
        raise StartupError(f"{folder} holds a classifier: name it in RERANKER_MODEL")
    if read_architecture(folder).endswith(("ForCausalLM", "LMHeadModel")):
        raise StartupError(
            f"{folder} holds a language model, and no configuration says how its vectors are "
            "pooled: set POOLING"
        )


def set_normalize(config: SentenceConfig, *, enabled: bool) -> SentenceConfig:
    """Return the configuration with `normalize` as the last step, or without it there."""
    before = config.steps[:-1] if config.steps[-1:] == (normalize,) else config.steps
    return replace(config, steps=(*before, normalize) if enabled else before)


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
