"""Loads the transformer in a folder: by a family of its own here, or by transformers' modules.

Knows which family computes which `model_type`; what is made of the states is not known here.
"""

from functools import partial
from pathlib import Path

import torch

from smart_embedder.errors import StartupError
from smart_embedder.models.batch.packing import PositionScheme, pack
from smart_embedder.models.checkpoint.config import TextOptions, read_config
from smart_embedder.models.checkpoint.weights import Weights
from smart_embedder.models.families.backbone import Backbone, Target
from smart_embedder.models.families.bert import (
    ENCODER_TYPES,
    EncoderConfig,
    EncoderParameters,
    make_encoder,
)
from smart_embedder.models.families.int8 import calibration_sequences, make_quantized_encoder
from smart_embedder.models.families.qwen3 import DecoderConfig, DecoderParameters, make_decoder
from smart_embedder.models.ops.proof import DECODER, ENCODER, GPU_ENCODER, QUANTIZED_ENCODER, Shapes
from smart_embedder.models.text.tokenizer import TextTokenizer

# Types whose states stay within the range of float16.
_HALF_PRECISION_TYPES = {*ENCODER_TYPES, "distilbert", "electra", "mpnet"}


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
    from smart_embedder.models.families.transformers_module import load_by_transformers  # noqa: PLC0415

    backbone = load_by_transformers(folder, target)
    return backbone, read_tokenizer(min(max_length, backbone.max_length))


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
    parameters = EncoderParameters(weights, config, target.device, target.dtype)
    parameters.compare_shapes()
    shapes = Shapes(
        width=config.width,
        inner_width=config.inner_width,
        heads=config.heads,
        key_heads=config.heads,
        head_width=config.width // config.heads,
        activation=config.activation,
    )
    if target.quantized:
        target = target.prove(shapes, QUANTIZED_ENCODER)
        # In float32, so that the weights of the file are rounded only once.
        exact = EncoderParameters(weights, config, target.device, torch.float32)
        texts = calibration_sequences(tokenizer)
        packed = pack(texts, device=target.device, positions=config.position_scheme)
        encoder = make_quantized_encoder(exact, target.backend, target.dtype, packed)
    else:
        on_cpu = target.device.type == "cpu"
        target = target.prove(shapes, ENCODER if on_cpu else GPU_ENCODER)
        encoder = make_encoder(parameters, target.backend)
    return Backbone(
        encoder,
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
    shapes = Shapes(
        width=config.width,
        inner_width=config.inner_width,
        heads=config.heads,
        key_heads=config.key_heads,
        head_width=config.head_width,
        bias=False,
        causal=True,
    )
    target = target.prove(shapes, DECODER)
    return Backbone(
        make_decoder(parameters, target.backend),
        target,
        hidden_size=config.width,
        max_length=config.positions,
        parameters=config.parameters,
        positions=PositionScheme(),
    )
