"""Loads the transformer in a folder by the family that implements its `model_type`.

Types without an implementation here are loaded by transformers' modules.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from smart_embedder.errors import StartupError
from smart_embedder.kernels.backend import Backend, float8_backend, unprepared_backend
from smart_embedder.kernels.cuda import CUDA
from smart_embedder.kernels.native import can_attend, can_multiply
from smart_embedder.kernels.packed_batch import PackedBatch, PositionScheme, pack
from smart_embedder.kernels.proof import prove
from smart_embedder.kernels.target import DECODER, ENCODER, GPU_ENCODER, Shapes, Target
from smart_embedder.models.families import bert, qwen3
from smart_embedder.models.families.backbone import Backbone, Transformer
from smart_embedder.models.families.bert import (
    ENCODER_TYPES,
    EncoderConfig,
    is_encoder,
    make_encoder,
)
from smart_embedder.models.families.int8 import (
    encode_calibration,
    make_quantized_decoder,
    make_quantized_encoder,
    min_cosine,
)
from smart_embedder.models.families.qwen3 import DecoderConfig, find_other_option, make_decoder
from smart_embedder.models.files.chat_template import read_text_frame
from smart_embedder.models.files.config import TextOptions, read_transformer_config
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.tokens import TokenIds

# Types whose states stay within the range of float16.
_HALF_PRECISION_TYPES = {*ENCODER_TYPES, "distilbert", "electra", "mpnet"}
# The lowest cosine between vectors in float8 and in the target's dtype; random weights reach 0.99.
_MIN_COSINE = 0.98
# One in this many calibration texts is compared with float32; all would take seconds.
_COMPARED_EVERY = 8


def is_qwen3(folder: Path) -> bool:
    """Whether the folder holds a causal decoder of Qwen3's kind."""
    config = read_transformer_config(folder)
    attends_back = config.get("is_causal", True) and not config.get("use_bidirectional_attention")
    return config.get("model_type") == "qwen3" and bool(attends_back)


def is_quantized_by_layers(folder: Path) -> bool:
    """Whether the start in 8 bits quantizes layer by layer, so that it never holds all weights."""
    return _is_decoder(folder) or is_encoder(read_transformer_config(folder))


def _is_decoder(folder: Path) -> bool:
    """Whether the decoder implemented here computes the model."""
    return is_qwen3(folder) and find_other_option(read_transformer_config(folder)) is None


def overflows_float16(folder: Path) -> bool:
    """Whether states may leave the range of float16, so that the model needs bfloat16."""
    model_type = read_transformer_config(folder).get("model_type")
    return model_type not in _HALF_PRECISION_TYPES


def load_backbone(
    folder: Path,
    target: Target,
    max_length: int,
    texts: TextOptions,
    *,
    closing: str | None = None,
    weights: Weights | None = None,
    calibrate: Callable[[TextTokenizer], list[TokenIds]] = encode_calibration,
    **classifier: Any,
) -> tuple[Backbone, TextTokenizer]:
    """Load the transformer in `folder`, of any family, and its tokenizer.

    The tokenizer follows the options in `texts`, cuts texts to `max_length` tokens or to the number
    of positions, and ends them with the token `closing`. `weights` are the folder's, if they were
    read already. With options of a `classifier`, transformers' own class computes its logits, too.
    Raises `StartupError` for a folder that cannot be used.
    """

    def read_tokenizer(positions: int) -> TextTokenizer:
        longest = min(max_length, texts.max_length or max_length, positions)
        frame = None
        if texts.message_format is not None:
            frame = read_text_frame(folder, texts.message_format, texts.template_options)
        return TextTokenizer.from_folder(
            folder, longest, closing=closing, lower_case=texts.lower_case, frame=frame
        )

    if _is_decoder(folder) and not classifier:
        tokenizer = read_tokenizer(DecoderConfig.read(folder).positions)
        weights = weights or Weights.read(folder)
        return load_decoder(folder, target, weights, calibrate(tokenizer)), tokenizer
    if is_encoder(read_transformer_config(folder)) and not classifier:
        tokenizer = read_tokenizer(EncoderConfig.read(folder).max_length)
        return load_encoder(folder, target, calibrate(tokenizer), weights), tokenizer
    if target.float8:
        raise StartupError(
            f"DTYPE=float8 is for models of BERT's kind and Qwen3, and the model in {folder} is "
            "neither; set DTYPE to auto"
        )
    # transformers takes seconds to import, and most models do not need it.
    from smart_embedder.models.families.auto_model import load_by_transformers  # noqa: PLC0415

    return load_by_transformers(folder, target, read_tokenizer, **classifier)


def load_tokenizer(folder: Path, max_length: int) -> TextTokenizer:
    """Load an encoder's tokenizer; it cuts texts to `max_length` or the number of positions.

    Raises `StartupError` for a folder that cannot be used.
    """
    return TextTokenizer.from_folder(folder, min(max_length, EncoderConfig.read(folder).max_length))


def load_encoder(
    folder: Path,
    target: Target,
    calibration: Sequence[TokenIds],
    weights: Weights | None = None,
) -> Backbone:
    """Load an encoder of BERT's or RoBERTa's architecture, from `weights` if they are given.

    In 8 bits it is quantized for texts like those of `calibration`. Raises `StartupError` for a
    folder that cannot be used.
    """
    config = EncoderConfig.read(folder)
    weights = (weights or Weights.read(folder)).with_prefix_of(bert.TOKENS)
    # Checks all shapes before `prove` computes with the sizes in config.json.
    make_encoder(weights.shapes_only(), config, unprepared_backend(), target.dtype)
    heads, head_width = config.heads, config.width // config.heads
    shapes = Shapes(
        config.width, config.inner_width, heads, heads, head_width, activation=config.activation
    )
    target = prove(target, shapes, ENCODER if target.device.type == "cpu" else GPU_ENCODER)
    pack_texts = partial(pack, device=target.device, positions=config.position_scheme)
    encoder: Transformer
    if target.quantized:
        compared = calibration[1::_COMPARED_EVERY]
        encoder = make_quantized_encoder(
            weights, config, target, pack_texts(calibration), compared=pack_texts(compared)
        )
    else:
        weights = weights.to(target.device, target.dtype)
        make = partial(make_encoder, weights, config, dtype=target.dtype)
        encoder = _make_transformer(make, target, partial(pack_texts, calibration), folder.name)
    return Backbone(
        encoder,
        target,
        hidden_size=config.width,
        max_length=config.max_length,
        parameters=config.parameters,
        positions=config.position_scheme,
        configuration=config,
        reproducible=can_multiply(config.width, config.inner_width) and can_attend(head_width),
    )


def load_decoder(
    folder: Path, target: Target, weights: Weights, calibration: Sequence[TokenIds]
) -> Backbone:
    """Load a decoder of Qwen3's architecture, as `load_encoder` does."""
    config = DecoderConfig.read(folder)
    weights = weights.with_prefix_of(qwen3.TOKENS)
    make_decoder(weights.shapes_only(), config, unprepared_backend())
    shapes = Shapes(
        config.width, config.inner_width, config.heads, config.key_heads, config.head_width,
        bias=False, causal=True,
    )  # fmt: skip
    target = prove(target, shapes, DECODER)
    pack_texts = partial(pack, calibration, device=target.device)
    decoder: Transformer
    if target.quantized:
        decoder = make_quantized_decoder(weights, config, target, pack_texts())
    else:
        weights = weights.to(target.device, target.dtype)
        decoder = _make_transformer(
            partial(make_decoder, weights, config), target, pack_texts, folder.name
        )
    return Backbone(
        decoder,
        target,
        hidden_size=config.width,
        max_length=config.positions,
        parameters=config.parameters,
        positions=PositionScheme(),
        configuration=config,
        reproducible=can_multiply(config.width, config.inner_width)
        and can_attend(config.head_width),
    )


def _make_transformer(
    make: Callable[[Backend], Transformer],
    target: Target,
    pack_texts: Callable[[], PackedBatch],
    name: str,
) -> Transformer:
    """Call `make` with the target's backend; with `float8`, with one that multiplies in float8.

    In float8 it also compares the vectors of some texts with those in the target's dtype. Raises
    `StartupError` if they differ, or if the device does not multiply in float8 correctly.
    """
    if not target.float8:
        return make(target.backend)
    if target.paths["float8_product"] != CUDA:
        raise StartupError(
            "this device does not multiply in float8 correctly (path_refused in the log says why); "
            "set DTYPE to auto"
        )
    texts, dtype = pack_texts(), target.dtype
    with torch.inference_mode():
        exact = make(target.backend)(texts)
        transformer = make(float8_backend(target.backend, dtype))
        lowest = min_cosine(transformer(texts), exact, texts)
    if not lowest >= _MIN_COSINE:
        raise StartupError(
            f"in float8 a vector of {name} has a cosine of {lowest:.4f} with the one in "
            f"{str(dtype).removeprefix('torch.')}, and at least {_MIN_COSINE} is required; set "
            "DTYPE to auto"
        )
    return transformer
