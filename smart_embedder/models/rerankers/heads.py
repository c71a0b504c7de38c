"""The parts of a reranker that compute: a transformer, and a head from its states to logits.

The head is that of a classifier of a type that is computed here, of transformers' own class, of
sentence-transformers' modules, or a row of a language model's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from smart_embedder.errors import StartupError
from smart_embedder.kernels.backend import make_linear
from smart_embedder.kernels.packed_batch import End, PackedBatch
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.families.registry import load_backbone
from smart_embedder.models.files.config import (
    CLASSES,
    LANGUAGE,
    STATES,
    TRANSFORMERS,
    TextOptions,
    has_module,
    is_classifier,
    read_architecture,
    read_config,
    read_number,
    read_transformer_config,
    require_known_modules,
    transformer_folder,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.pooling import (
    ENDS,
    SentenceConfig,
    VectorLayer,
    first,
    last,
    last_before_padding,
    mean,
    place_steps,
    pool,
)
from smart_embedder.models.rerankers.templates import (
    HEAD,
    KINDS,
    LOGIT_SCORE,
    TOKENS,
    has_language_head,
)
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.models.tokenizer_options import marks_segments

Pool = Callable[[Tensor, PackedBatch], Tensor]


@dataclass(frozen=True, slots=True)
class _HeadNames:
    """The names of a head's layers, and the activation after the dense layer.

    Without an `activation` it is that of ModernBERT's `config.json`, and a norm follows. A head
    without a dense layer has no bias. `reads` is the token that it reads, or `configured` by the
    configuration.
    """

    dense: str | None = None
    activation: Callable[[], nn.Module] | None = None
    logits: str = "classifier"
    reads: Literal["first", "last", "configured"] = "first"


_NAMES_BY_TYPE = dict.fromkeys(
    ("roberta", "xlm-roberta", "camembert", "mpnet"),
    _HeadNames("classifier.dense", nn.Tanh, "classifier.out_proj"),
) | {
    "bert": _HeadNames("pooler.dense", nn.Tanh),
    "distilbert": _HeadNames("pre_classifier", nn.ReLU),
    "qwen3": _HeadNames(logits="score", reads="last"),
    "modernbert": _HeadNames("head.dense", reads="configured"),
}
# The ends of architectures of which the body is left if they lack their head.
_WITHOUT_HEAD = ("Model", "ForCausalLM", "ForSequenceClassification")
_POOLINGS = {"cls": first, "mean": mean}
# Types whose logits are the products of a language model's head with the states, without further
# steps, and those that share it with the embeddings unless their configuration says otherwise.
PLAIN_HEADS = {
    "gemma", "gemma3_text", "llama", "ministral", "ministral3", "mistral", "olmo2", "olmo3",
    "phi3", "qwen2", "qwen3", "smollm3",
}  # fmt: skip
_TIED_BY_DEFAULT = {"gemma", "gemma3_text", "smollm3"}


@dataclass(frozen=True, slots=True)
class Scorer:
    """A transformer, and a head that computes logits `[N, labels]` of its states.

    `pool` computes a vector of each sequence, whose name is in vector space ids, and `layers` its
    logits. `end` is the token that `pool` reads; None if it reads several.
    """

    backbone: Backbone
    tokenizer: TextTokenizer
    pool: Pool
    pooling: str
    layers: nn.Module
    end: End | None
    labels: int


def _load_body(
    folder: Path, max_length: int, target: Target, task: tuple[str, str], **options: Any
) -> tuple[Backbone, TextTokenizer]:
    """Load the transformer of a model that was trained for the task; pairs are no messages."""
    transformer = transformer_folder(folder)
    texts = replace(TextOptions.read(transformer, task), message_format=None)
    return load_backbone(transformer, target, max_length, texts, **options)


def load_classifier(folder: Path, max_length: int, target: Target) -> Scorer:
    """Load a cross-encoder; raises `StartupError` if the folder holds none."""
    if has_module(folder, "Pooling"):
        return _load_modules(folder, max_length, target)
    require_known_modules(folder, *TRANSFORMERS)
    if read_transformer_config(folder).get("model_type") in _NAMES_BY_TYPE:
        return _load_own_head(folder, max_length, target)
    if not is_classifier(folder):
        raise _no_head_error(folder)
    marks = marks_segments(transformer_folder(folder))
    backbone, tokenizer = _load_body(
        folder, max_length, target, CLASSES, classifies="sequences", marks_segments=marks
    )
    # The state of each token is the logits of its sequence.
    labels = backbone.hidden_size
    return Scorer(backbone, tokenizer, first, "classifier", nn.Identity(), "first", labels)


def _load_modules(folder: Path, max_length: int, target: Target) -> Scorer:
    """Load a cross-encoder of sentence-transformers' modules: a pooling and layers behind it."""
    config = SentenceConfig.read(folder, result="scores")
    steps = [step for step in config.steps if isinstance(step, VectorLayer)]
    if not steps:
        raise StartupError(
            f"{folder} holds an embedding model and not a reranker: no module of it computes scores"
        )
    if len(steps) < len(config.steps):
        raise StartupError(
            f"{folder / 'modules.json'} has other modules behind the pooling than Dense and "
            "LayerNorm, which are supported for a reranker"
        )
    backbone, tokenizer = _load_body(folder, max_length, target, STATES)
    labels = place_steps(config, backbone)

    def pool_all(hidden: Tensor, packed: PackedBatch) -> Tensor:
        return pool(hidden, packed, config.poolings, np.arange(len(packed.lengths)))

    name = "+".join(config.poolings)
    end, layers = ENDS.get(name), nn.Sequential(*steps)
    return Scorer(backbone, tokenizer, pool_all, name, layers, end, labels)


def _load_own_head(folder: Path, max_length: int, target: Target) -> Scorer:
    """Load a classifier of a type whose head is computed here."""
    weights, config = Weights.read(transformer_folder(folder)), read_transformer_config(folder)
    names = _NAMES_BY_TYPE[config["model_type"]]
    if f"{names.logits}.weight" not in weights:
        raise _no_head_error(folder)
    # Decoders that classify tokens have a head of the same name.
    if names.reads == "last" and not is_classifier(folder):
        raise StartupError(
            f"{folder} holds a classifier by its weights, and config.json names "
            f"{read_architecture(folder) or 'no architecture'}, which is no reranker"
        )
    backbone, tokenizer = _load_body(folder, max_length, target, CLASSES, weights=weights)
    width = backbone.hidden_size
    layers = _load_dense(names, config, weights, width)
    logits = weights.linear(names.logits, width, None, bias=names.dense is not None)
    pool_states: Pool = first
    if names.reads == "last":
        pool_states = partial(last_before_padding, config.get("pad_token_id"))
    elif names.reads == "configured":  # transformers has refused other poolings.
        pool_states = _POOLINGS[config.get("classifier_pooling", "cls")]

    def pool_rounded(hidden: Tensor, packed: PackedBatch) -> Tensor:
        return pool_states(hidden, packed).to(hidden.dtype)

    return Scorer(
        backbone,
        tokenizer,
        pool_rounded,
        getattr(pool_states, "__name__", "last"),
        backbone.place_head(nn.Sequential(*layers, logits)),
        "first" if pool_states is first else None,
        logits.out_features,
    )


def _no_head_error(folder: Path) -> StartupError:
    """Return the error for a model that is no classifier."""
    architecture = read_architecture(folder)
    is_language_model = architecture.endswith("ForCausalLM")
    if is_language_model and has_language_head(folder, Weights.read(transformer_folder(folder))):
        return StartupError(
            f"{folder} holds a language model, and its files do not say with which template it was "
            f"trained to rerank: set its kind to one of {KINDS}"
        )
    is_embedder = not architecture or architecture.endswith(_WITHOUT_HEAD)
    found = "an embedding model" if is_embedder else f"a {architecture}"
    return StartupError(f"{folder} holds {found} and not a reranker: it has no classification head")


def _load_dense(
    names: _HeadNames, config: dict[str, Any], weights: Weights, width: int
) -> list[nn.Module]:
    """Load the layers of a head before its logits, which keep the width of a state."""
    if names.dense is None:
        return []
    # BERT's pooler has the prefix of the transformer's layers in the checkpoint.
    prefixed = weights.with_prefix_of(f"{names.dense}.weight")
    has_bias = f"{names.dense}.bias" in prefixed
    dense = prefixed.linear(names.dense, width, width, bias=has_bias)
    if names.activation is not None:
        return [dense, names.activation()]
    # Imported only here: ModernBERT, which alone has these options, has loaded it already.
    from transformers.activations import ACT2FN  # noqa: PLC0415

    option = str(config.get("classifier_activation", "gelu"))
    if option not in ACT2FN:
        raise StartupError(
            f"{weights.folder} has the classifier_activation {option}, which transformers does not "
            "know"
        )
    epsilon = read_number(weights.folder, config, "norm_eps", 1e-5)
    return [dense, ACT2FN[option], weights.norm("head.norm", width, epsilon)]


def load_language_model(
    name: str,
    folder: Path,
    max_length: int,
    target: Target,
    answers: Sequence[str | int],
    **options: Any,
) -> Scorer:
    """Load a language model, whose logit is that of one answer, or the difference of two.

    Only their rows of its head are read. Raises `StartupError` if its logits are not computed so.
    """
    require_known_modules(folder, "Transformer", LOGIT_SCORE)
    weights, config = Weights.read(transformer_folder(folder)), read_transformer_config(folder)
    model_type = config.get("model_type")
    has_steps = "lm_head.bias" in weights or config.get("final_logit_softcapping") is not None
    if model_type not in PLAIN_HEADS or has_steps:
        raise StartupError(
            f"{name} is a language model of type {model_type}, whose logits are not supported "
            f"for a reranker; those of {', '.join(sorted(PLAIN_HEADS))} are"
        )
    if not has_language_head(folder, weights):
        raise StartupError(
            f"{folder} holds an embedding model and not a reranker: it has no head of a language "
            "model"
        )
    task = LANGUAGE if has_module(folder, LOGIT_SCORE) else STATES
    backbone, tokenizer = _load_body(folder, max_length, target, task, weights=weights, **options)
    row, *second = (_read_row(weights, tokenizer, answer) for answer in answers)
    row = row - second[0] if second else row
    answer = backbone.place_head(make_linear(row[None], None), torch.float32)
    return Scorer(backbone, tokenizer, last, "last", answer, "last", 1)


def _read_row(weights: Weights, tokenizer: TextTokenizer, token: str | int) -> Tensor:
    """Read the row of the language model's head for one token, in float32.

    If the file has a head, it is used even if the configuration says that it is the embedding.
    """
    if isinstance(token, str):
        ids = tokenizer.encode_plain([token], 2)[0].ids
        if len(ids) != 1:
            raise StartupError(f"the vocabulary in {weights.folder} has no token {token}")
        token = int(ids[0])
    config = read_config(weights.folder)
    is_tied = config.get("tie_word_embeddings", config.get("model_type") in _TIED_BY_DEFAULT)
    if HEAD not in weights and is_tied:
        return weights.with_prefix_of(TOKENS).row(TOKENS, token)
    return weights.row(HEAD, token)
