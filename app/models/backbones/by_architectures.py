"""Loads the models that `architectures` implements: BERT's kind and Qwen3's."""

from functools import partial
from pathlib import Path

import torch

from app.errors import StartupError
from app.models.architectures.bert import Encoder, EncoderParameters, make_encoder
from app.models.architectures.bert_config import EncoderConfig
from app.models.architectures.qwen3 import DecoderParameters, make_decoder
from app.models.architectures.qwen3_config import DecoderConfig
from app.models.backbones.backbone import Backbone
from app.models.batch.packing import pack
from app.models.batch.position_ids import PositionScheme
from app.models.checkpoint.weights import Weights
from app.models.ops.proof_cases import (
    DECODER,
    ENCODER,
    GPU_ENCODER,
    QUANTIZED_ENCODER,
    Shapes,
)
from app.models.quantization.calibration import calibration_sequences
from app.models.quantization.encoder import make_quantized_encoder
from app.models.target import Target
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
