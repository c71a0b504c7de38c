"""Loads the transformer in a folder by the family that implements its `model_type`.

Types without an implementation here are loaded by transformers' modules.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from smart_embedder.errors import StartupError
from smart_embedder.kernels.backend import Backend, float8_backend, unprepared_backend
from smart_embedder.kernels.cuda import CUDA
from smart_embedder.kernels.native import can_attend, can_multiply
from smart_embedder.kernels.packed_batch import PackedBatch, pack
from smart_embedder.kernels.proof import prove
from smart_embedder.kernels.target import DECODER, ENCODER, GPU_ENCODER, Target
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


class _Family(NamedTuple):
    """A family whose layers are implemented here.

    The names of its tensors are those of transformers, and `first_tensor` is one of each
    checkpoint.
    """

    config: type[Any]
    first_tensor: str
    make: Callable[[Weights, Any, Backend], Transformer]
    make_quantized: Callable[[Weights, Any, Target, Sequence[TokenIds]], Transformer]
    operations: Sequence[str]
    gpu_operations: Sequence[str]


_ENCODER = _Family(
    EncoderConfig, bert.TOKENS, make_encoder, make_quantized_encoder, ENCODER, GPU_ENCODER
)
_DECODER = _Family(
    DecoderConfig, qwen3.TOKENS, make_decoder, make_quantized_decoder, DECODER, DECODER
)


def is_qwen3(folder: Path) -> bool:
    """Whether the folder holds a causal decoder of Qwen3's kind."""
    config = read_transformer_config(folder)
    attends_back = config.get("is_causal", True) and not config.get("use_bidirectional_attention")
    return config.get("model_type") == "qwen3" and bool(attends_back)


def _find_family(folder: Path) -> _Family | None:
    config = read_transformer_config(folder)
    if is_encoder(config):
        return _ENCODER
    return _DECODER if is_qwen3(folder) and find_other_option(config) is None else None


def has_own_layers(folder: Path) -> bool:
    """Whether the layers of the model are implemented here, and not by transformers."""
    return _find_family(folder) is not None


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

    family = _find_family(folder)
    if family is not None and not classifier:
        tokenizer = read_tokenizer(family.config.read(folder).max_length)
        return load_own(folder, target, calibrate(tokenizer), weights), tokenizer
    if target.float8:
        raise StartupError(
            f"DTYPE=float8 is for models of BERT's kind and Qwen3, and the model in {folder} is "
            "neither; set DTYPE to auto"
        )
    # transformers takes seconds to import, and most models do not need it.
    from smart_embedder.models.families.auto_model import load_by_transformers  # noqa: PLC0415

    return load_by_transformers(folder, target, read_tokenizer, **classifier)


def load_own(
    folder: Path,
    target: Target,
    calibration: Sequence[TokenIds],
    weights: Weights | None = None,
) -> Backbone:
    """Load a transformer whose layers are implemented here, from `weights` if they are given.

    In 8 bits it is quantized for texts like those of `calibration`. Raises `StartupError` for a
    folder that cannot be used.
    """
    family = _find_family(folder) or _ENCODER
    config = family.config.read(folder)
    weights = (weights or Weights.read(folder)).with_prefix_of(family.first_tensor)
    # Checks all shapes before `prove` computes with the sizes in config.json. Nothing is computed
    # on this device, or PyTorch would import its compiler, which takes a second.
    family.make(weights.to(torch.device("meta"), target.dtype), config, unprepared_backend())
    is_on_cpu = target.device.type == "cpu"
    target = prove(target, config.shapes, family.operations if is_on_cpu else family.gpu_operations)
    if target.quantized:
        transformer = family.make_quantized(weights, config, target, calibration)
    else:
        make = partial(family.make, weights.to(target.device, target.dtype), config)
        positions = config.position_scheme
        pack_texts = partial(pack, calibration, device=target.device, positions=positions)
        transformer = _make_transformer(make, target, pack_texts, folder.name)
    shapes = config.shapes
    return Backbone(
        transformer,
        target,
        hidden_size=config.width,
        max_length=config.max_length,
        parameters=config.parameters,
        positions=config.position_scheme,
        configuration=config,
        reproducible=can_multiply(shapes.width, shapes.inner_width)
        and can_attend(shapes.head_width),
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
