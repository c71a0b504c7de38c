"""Chooses the implementation of a model: one of `architectures`, or transformers' modules."""

from functools import partial
from pathlib import Path

import torch

from app.errors import StartupError
from app.models.batch.packing import PositionScheme, pack
from app.models.checkpoint.config import TextOptions, read_config
from app.models.checkpoint.weights import Weights
from app.models.families.backbone import Backbone, Target
from app.models.families.bert import (
    ENCODER_TYPES,
    Encoder,
    EncoderConfig,
    EncoderParameters,
    make_encoder,
)
from app.models.families.int8 import calibration_sequences, make_quantized_encoder
from app.models.families.qwen3 import DecoderConfig, DecoderParameters, make_decoder
from app.models.ops.proof import (
    DECODER,
    ENCODER,
    GPU_ENCODER,
    QUANTIZED_ENCODER,
    Shapes,
)
from app.models.text.tokenizer import TextTokenizer


def load_tokenizer(folder: Path, max_length: int) -> TextTokenizer:
    """Load an encoder's tokenizer; texts are cut to `max_length` or the number of positions.

    Raises `StartupError` for a folder that cannot be used.
    """
    return TextTokenizer.from_folder(folder, min(max_length, EncoderConfig.read(folder).max_length))


def load_encoder(
    folder: Path, target: Target, tokenizer: TextTokenizer, weights: Weights | None = None
) -> Backbone:
    """Load an encoder of BERT's or RoBERTa's architecture, from `weights` if they are given.

    `tokenizer` is that of the model. Raises `StartupError` for a folder that cannot be used.
    """
    config = EncoderConfig.read(folder)
    weights = Weights.read(folder) if weights is None else weights
    EncoderParameters(weights, config, target.device, target.dtype).compare_shapes()
    target = target.prove(_encoder_shapes(config), _encoder_operations(target))
    make = partial(_quantized, tokenizer) if target.quantized else _unquantized
    return Backbone(
        make(weights, config, target),
        target,
        hidden_size=config.width,
        max_length=config.max_length,
        parameters=config.parameters,
        positions=config.position_scheme,
    )


def load_decoder(folder: Path, target: Target, weights: Weights) -> Backbone:
    """Load a decoder of Qwen3's architecture; raises `StartupError` if it cannot be used."""
    config = DecoderConfig.read(folder)
    if target.quantized:
        raise StartupError(
            "DTYPE=int8 is for models of bge-m3's and bge-reranker's kind, and this is one of type "
            "qwen3; set DTYPE to auto"
        )
    parameters = DecoderParameters(weights, config, target.device, target.dtype)
    parameters.compare_shapes()
    target = target.prove(_decoder_shapes(config), DECODER)
    return Backbone(
        make_decoder(parameters, target.backend),
        target,
        hidden_size=config.width,
        max_length=config.positions,
        parameters=config.parameters,
        positions=PositionScheme(),
    )


def _encoder_operations(target: Target) -> tuple[str, ...]:
    if target.quantized:
        return QUANTIZED_ENCODER
    return ENCODER if target.device.type == "cpu" else GPU_ENCODER


def _encoder_shapes(config: EncoderConfig) -> Shapes:
    return Shapes(
        width=config.width,
        inner_width=config.inner_width,
        heads=config.heads,
        key_heads=config.heads,
        head_width=config.width // config.heads,
        activation=config.activation,
    )


def _decoder_shapes(config: DecoderConfig) -> Shapes:
    return Shapes(
        width=config.width,
        inner_width=config.inner_width,
        heads=config.heads,
        key_heads=config.key_heads,
        head_width=config.head_width,
        bias=False,
        causal=True,
    )


def _unquantized(weights: Weights, config: EncoderConfig, target: Target) -> Encoder:
    parameters = EncoderParameters(weights, config, target.device, target.dtype)
    return make_encoder(parameters, target.backend)


def _quantized(
    tokenizer: TextTokenizer, weights: Weights, config: EncoderConfig, target: Target
) -> Encoder:
    # In float32, so that the weights of the file are rounded only once.
    parameters = EncoderParameters(weights, config, target.device, torch.float32)
    texts = calibration_sequences(tokenizer)
    packed = pack(texts, device=target.device, positions=config.position_scheme)
    return make_quantized_encoder(parameters, target.backend, target.dtype, packed)


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
    from app.models.families.transformers_module import load_by_transformers  # noqa: PLC0415

    backbone = load_by_transformers(folder, target)
    return backbone, read_tokenizer(min(max_length, backbone.max_length))
