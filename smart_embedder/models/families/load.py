"""Loads the transformer in a folder: by a family of its own here, or by transformers' modules.

Knows which family computes which `model_type`; what is made of the states is not known here.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from smart_embedder.engine.records import TokenIds
from smart_embedder.errors import StartupError
from smart_embedder.models.batch import PackedBatch, PositionScheme, pack
from smart_embedder.models.checkpoint.config import TextOptions, read_config
from smart_embedder.models.checkpoint.weights import Weights
from smart_embedder.models.families import bert, qwen3
from smart_embedder.models.families.backbone import Backbone, Transformer
from smart_embedder.models.families.bert import ENCODER_TYPES, EncoderConfig, make_encoder
from smart_embedder.models.families.int8 import (
    encode_calibration,
    least_cosine,
    make_quantized_decoder,
    make_quantized_encoder,
)
from smart_embedder.models.families.qwen3 import DecoderConfig, make_decoder
from smart_embedder.models.ops.backend import Backend, in_float8
from smart_embedder.models.ops.cuda import CUDA
from smart_embedder.models.ops.native import attends, multiplies
from smart_embedder.models.ops.proof import (
    DECODER,
    ENCODER,
    FLOAT8_DECODER,
    FLOAT8_ENCODER,
    GPU_ENCODER,
    QUANTIZED_DECODER,
    QUANTIZED_ENCODER,
    Shapes,
    Target,
)
from smart_embedder.models.text.tokenizer import TextTokenizer

# Types whose states stay within the range of float16.
_HALF_PRECISION_TYPES = {*ENCODER_TYPES, "distilbert", "electra", "mpnet"}
# Of a vector in float8 with the one without: the least that even random weights reach is 0.99.
_LEAST_COSINE = 0.98
# One of so many texts of the calibration is compared with float32: all take seconds.
_COMPARED_OF = 8


def is_qwen3(folder: Path) -> bool:
    """Whether the folder holds a causal decoder of Qwen3's kind."""
    config = read_config(folder)
    return config.get("model_type") == "qwen3" and bool(config.get("is_causal", True))


def is_quantized_by_layers(folder: Path) -> bool:
    """Whether a start in 8 bits never holds all weights as they are in the file."""
    return is_qwen3(folder) or read_config(folder).get("model_type") in ENCODER_TYPES


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

    def read_tokenizer(positions: int) -> TextTokenizer:
        longest = min(max_length, texts.max_length or max_length, positions)
        return TextTokenizer.from_folder(
            folder, longest, closing=closing, lower_case=texts.lower_case
        )

    if is_qwen3(folder):
        tokenizer = read_tokenizer(DecoderConfig.read(folder).positions)
        backbone = load_decoder(
            folder, target, weights or Weights.read(folder), encode_calibration(tokenizer)
        )
        return backbone, tokenizer
    if read_config(folder).get("model_type") in ENCODER_TYPES:
        tokenizer = read_tokenizer(EncoderConfig.read(folder).max_length)
        return load_encoder(folder, target, tokenizer, weights), tokenizer
    if target.float8:
        raise StartupError(
            f"DTYPE=float8 is for models of BERT's kind and Qwen3, and {folder} holds none; set "
            "DTYPE to auto"
        )
    # transformers takes seconds to import, and most models do not need it.
    from smart_embedder.models.families.transformers_module import load_by_transformers  # noqa: PLC0415

    return load_by_transformers(folder, target, read_tokenizer)


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
    config, device, dtype = EncoderConfig.read(folder), target.device, target.dtype
    encoder: Transformer
    weights = (weights or Weights.read(folder)).before(bert.TOKENS)
    # Before anything is computed with sizes that may be wrong: operations are proven first.
    bert.check_parameters(weights, config)
    heads, head_width = config.heads, config.width // config.heads
    shapes = Shapes(
        config.width, config.inner_width, heads, heads, head_width, activation=config.activation
    )
    if target.quantized:
        target = target.prove(shapes, QUANTIZED_ENCODER)
        texts = encode_calibration(tokenizer)
        packed, compared = (
            pack(each, device=device, positions=config.position_scheme)
            for each in (texts, texts[1::_COMPARED_OF])
        )
        # In float32, so that the weights of the file are rounded only once.
        exact = weights.to(device, torch.float32)
        encoder = make_quantized_encoder(
            exact, config, target.backend, dtype, packed, compared=compared
        )
    else:
        operations = ENCODER if device.type == "cpu" else GPU_ENCODER
        target = target.prove(shapes, FLOAT8_ENCODER if target.float8 else operations)

        def make(backend: Backend) -> Transformer:
            return make_encoder(weights.to(device, dtype), config, backend, dtype)

        if target.float8:
            texts = encode_calibration(tokenizer)
            packed = pack(texts, device=device, positions=config.position_scheme)
            encoder = make_in_float8(make, target, packed, folder.name)
        else:
            encoder = make(target.backend)
    return Backbone(
        encoder,
        target,
        hidden_size=config.width,
        max_length=config.max_length,
        parameters=config.parameters,
        positions=config.position_scheme,
        configuration=config,
        reproducible=multiplies(config.width, config.inner_width) and attends(head_width),
    )


def load_decoder(
    folder: Path, target: Target, weights: Weights, calibration: Sequence[TokenIds]
) -> Backbone:
    """Load a decoder of Qwen3's architecture; raises `StartupError` if it cannot be used.

    In 8 bits it is quantized for texts like those of `calibration`.
    """
    config, device, dtype = DecoderConfig.read(folder), target.device, target.dtype
    decoder: Transformer
    weights = weights.before(qwen3.TOKENS)
    qwen3.check_parameters(weights, config)
    shapes = Shapes(
        config.width, config.inner_width, config.heads, config.key_heads, config.head_width,
        bias=False, causal=True,
    )  # fmt: skip
    if target.quantized:
        target = target.prove(shapes, QUANTIZED_DECODER)
        exact, packed = weights.to(device, torch.float32), pack(calibration, device=device)
        decoder = make_quantized_decoder(exact, config, target.backend, dtype, packed)
    else:
        target = target.prove(shapes, FLOAT8_DECODER if target.float8 else DECODER)

        def make(backend: Backend) -> Transformer:
            return make_decoder(weights.to(device, dtype), config, backend)

        if target.float8:
            packed = pack(calibration, device=device)
            decoder = make_in_float8(make, target, packed, folder.name)
        else:
            decoder = make(target.backend)
    return Backbone(
        decoder,
        target,
        hidden_size=config.width,
        max_length=config.positions,
        parameters=config.parameters,
        positions=PositionScheme(),
        configuration=config,
        reproducible=multiplies(config.width, config.inner_width) and attends(config.head_width),
    )


@torch.inference_mode()
def make_in_float8(
    make: Callable[[Backend], Transformer], target: Target, texts: PackedBatch, name: str
) -> Transformer:
    """What `make` makes with a backend whose products are in float8.

    Raises `StartupError` where the device does not compute them as it should, or where a vector of
    `texts` is not what it is in the target's own number format.
    """
    if target.paths["float8_product"] != CUDA:
        raise StartupError(
            "this device does not multiply in float8 as it should (path_refused in the log says "
            "why); set DTYPE to auto"
        )
    exact = make(target.backend)(texts)
    transformer = make(in_float8(target.backend, target.dtype))
    least, dtype = least_cosine(transformer(texts), exact, texts), target.dtype
    if not least >= _LEAST_COSINE:
        raise StartupError(
            f"in float8 a vector of {name} has a cosine of {least:.4f} with the one in "
            f"{str(dtype).removeprefix('torch.')}, and the least allowed is {_LEAST_COSINE}; set "
            "DTYPE to auto"
        )
    return transformer
