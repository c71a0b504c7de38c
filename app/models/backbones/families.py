"""Chooses the implementation of a model: one of `architectures`, or transformers' modules."""

from functools import partial
from pathlib import Path

from app.models.architectures.bert_config import ENCODER_TYPES, EncoderConfig
from app.models.architectures.qwen3_config import DecoderConfig
from app.models.backbones.backbone import Backbone
from app.models.backbones.by_architectures import load_decoder, load_encoder
from app.models.checkpoint.config import read_config
from app.models.checkpoint.sentence_config import TextOptions
from app.models.checkpoint.weights import Weights
from app.models.target import Target
from app.models.text.tokenizer import TextTokenizer

# Types whose states stay within the range of float16.
_HALF_PRECISION_TYPES = {*ENCODER_TYPES, "camembert", "distilbert", "electra", "mpnet"}


def is_qwen3(folder: Path) -> bool:
    """Whether the folder holds a causal decoder of Qwen3's kind."""
    config = read_config(folder)
    return config.get("model_type") == "qwen3" and bool(config.get("is_causal", True))


def overflows_float16(folder: Path) -> bool:
    """Whether states may leave the range of float16, so that bfloat16 is needed."""
    return read_config(folder).get("model_type") not in _HALF_PRECISION_TYPES


def load_backbone(
    folder: Path,
    target: Target,
    max_length: int,
    texts: TextOptions,
    *,
    closing: str | None = None,
    weights: Weights | None = None,
) -> tuple[Backbone, TextTokenizer]:
    """Load the transformer in `folder`, of any family, and its tokenizer.

    Texts are read by their options, cut to `max_length` tokens or to the number of positions, and
    end with the token `closing`. `weights` are the folder's, if they were read already. Raises
    `StartupError` for a folder that cannot be used.
    """
    read_tokenizer = partial(
        TextTokenizer.from_folder, folder, closing=closing, lower_case=texts.lower_case
    )
    max_length = min(max_length, texts.max_length or max_length)
    if is_qwen3(folder):
        tokenizer = read_tokenizer(min(max_length, DecoderConfig.read(folder).positions))
        return load_decoder(folder, target, weights or Weights.read(folder)), tokenizer
    if read_config(folder).get("model_type") in ENCODER_TYPES:
        tokenizer = read_tokenizer(min(max_length, EncoderConfig.read(folder).max_length))
        return load_encoder(folder, target, tokenizer, weights), tokenizer
    # transformers takes seconds to import, and most models do not need it.
    from app.models.backbones.by_transformers import load_by_transformers  # noqa: PLC0415

    backbone = load_by_transformers(folder, target)
    return backbone, read_tokenizer(min(max_length, backbone.max_length))
