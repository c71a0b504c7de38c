"""Linear layers in 8 bits for the CPU: weights by output channel, activations by row.

Weights are s8 with one scale for each output channel. Activations are u8 with a scale and a minimum
for each row, so no row depends on the other rows of its batch. (Signed activations would be slower:
without AMX oneDNN has no fast product of s8 with s8.)

In every trained model a few channels are many times as large as the others, and would leave them
few of the 255 steps. Two methods reduce that; both read the states of calibration texts. First,
each channel is divided by a power of its usual size, and the weights are multiplied with it
(SmoothQuant, Xiao et al. 2023). Then the largest channels are split over several columns, which
narrows the range of the row and makes the steps of these channels finer (Zhao et al. 2019).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import structlog
import torch
from torch import Tensor, nn
from torch.nn import functional

from smart_embedder.kernels.backend import (
    Backend,
    Columns,
    Linear,
    QuantizedLinear,
    QuantizedWeights,
    RmsNorm,
    RotaryEmbedding,
    make_add_linear,
    unprepared_backend,
)
from smart_embedder.kernels.packed_batch import PackedBatch, pack
from smart_embedder.kernels.target import Target
from smart_embedder.models.families import bert, qwen3
from smart_embedder.models.families.backbone import rows_undivided
from smart_embedder.models.families.bert import (
    Encoder,
    EncoderConfig,
    EncoderLayer,
    read_embeddings,
)
from smart_embedder.models.families.qwen3 import Decoder, DecoderConfig, read_ends
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.tokens import TokenIds

log = structlog.get_logger(__name__)

_TINY = 1e-30
# The lowest cosine between vectors in 8 bits and in float32 that is usual for trained models.
_MIN_COSINE = 0.995
# One in this many texts is compared with float32; all would take seconds.
_COMPARED_EVERY = 8
# SmoothQuant's alpha: 1 divides channels by the size of activations, 0 by that of weights.
_SMOOTHING = 0.4
# The smallest size of a channel, relative to the largest: calibration may not use it at all.
_MIN_SIZE = 1e-3
# One further column for each 64 channels, in multiples of the kernels' 16.
_CHANNELS_PER_REPEAT, _REPEAT_MULTIPLE = 64, 16
# The number of weights to round at a time: large temporary tensors would fragment the memory.
_WEIGHTS_PER_BLOCK = 2**18
# Texts of many scripts and kinds, whose states decide how channels are quantized.
CALIBRATION_TEXTS = (
    "",
    "Hybrid search joins dense vectors with lexical weights.",
    "Which harbour towns had a lighthouse before 1850, and who paid the keepers?",
    (
        "The committee met twice. It approved the budget, postponed the vote on the new library, "
        "and asked for a report on the state of the bridges before the frost; nobody objected."
    ),
    "Der Zug nach Hamburg fährt heute von Gleis sieben, voraussichtlich zwölf Minuten später.",
    "La rivière traverse trois villages avant de rejoindre la mer, près d'un vieux moulin.",
    "El horno debe estar muy caliente; el pan se cuece en unos treinta y cinco minutos.",
    "Весной река выходит из берегов, и дорога к мельнице закрыта до мая.",
    "图书馆周一闭馆, 其他日子从早上九点开到晚上八点。",
    "駅から博物館までは歩いて十分ほどです。",
    "تفتح المكتبة أبوابها كل يوم ما عدا يوم الجمعة.",
    "पहाड़ों में सर्दी जल्दी आती है और देर तक रहती है।",
    "def area(width: float, height: float) -> float:\n    return width * height  # in metres",
    "https://example.org/a/b?page=3&sort=desc  user@example.org  +49 30 1234567  3.14159e-10",
    "WARNING!!! READ THIS FIRST ... !!! ??? --- *** $$$ %%% (((( ))))",
    "ok",
    "the the the the the the the the the the the the the the the the the the the the",
    "🙂 🚲 🌧️ ☕",
)


def quantize(
    layers: Sequence[nn.Linear],
    states: Tensor,
    backend: Backend,
    dtype: torch.dtype,
    activation: str | None = None,
) -> QuantizedLinear:
    """Quantize layers that read states like `states` `[T, in]`; their outputs lie side by side.

    The outputs are in `dtype`.
    """
    divisor, columns = _choose_columns(states, layers)
    rows = max(1, _WEIGHTS_PER_BLOCK // len(columns.offsets))
    blocks = (block for layer in layers for block in torch.split(layer.weight.detach(), rows))
    limit = backend.int8_weight_limit
    quantized = (_quantize_block(block.float() * divisor, columns, limit) for block in blocks)
    values, scale, sums = map(torch.cat, zip(*quantized, strict=True))
    bias = torch.cat([_float32_bias(layer) for layer in layers])
    weights = QuantizedWeights(values, scale, sums, bias)
    return QuantizedLinear(columns, backend.int8_gemm(weights, dtype, activation), backend)


def _float32_bias(layer: nn.Linear) -> Tensor:
    return torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach().float()


def encode_calibration(tokenizer: TextTokenizer) -> list[TokenIds]:
    """Tokenize `CALIBRATION_TEXTS`, and leave out texts without tokens."""
    return [text.ids for text in tokenizer.encode(list(CALIBRATION_TEXTS)) if len(text.ids)]


@contextmanager
def calibrating_backend(backend: Backend, dtype: torch.dtype) -> Iterator[Backend]:
    """Provide a backend that computes products in 8 bits, and the rest in `dtype`.

    The first call of each product quantizes it for states like the ones it gets. Within the
    context, call all products with the states of `CALIBRATION_TEXTS`. Products that were not called
    are quantized at the end, for states whose channels all have the same size.
    """
    products: list[tuple[_CalibratedLinear, int]] = []

    def prepare(layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
        quantize_for = partial(
            quantize, layers, backend=backend, dtype=dtype, activation=activation
        )
        products.append((_CalibratedLinear(quantize_for), layers[0].in_features))
        return products[-1][0]

    with rows_undivided():
        yield backend.prefer("int8", linear=prepare, add_linear=make_add_linear(prepare))
    unreached = [(product, width) for product, width in products if product.quantize is not None]
    for product, width in unreached:
        product(torch.ones(1, width))
    if unreached:
        log.warning(
            "int8_not_calibrated",
            products=len(unreached),
            of=len(products),
            detail="no calibration text reaches these products of the model: if your texts do, "
            "their vectors may be less exact; DTYPE=auto computes them without rounding to 8 bits",
        )


class _CalibratedLinear:
    """A `Linear` that is quantized at its first call, for states like the ones it gets."""

    def __init__(self, quantize: Callable[[Tensor], QuantizedLinear]) -> None:
        self.quantize: Callable[[Tensor], QuantizedLinear] | None = quantize
        self.linear: QuantizedLinear

    def __call__(self, states: Tensor) -> Tensor:
        if self.quantize is not None:
            self.linear = self.quantize(states)
            self.quantize = None  # Frees the weights in float32.
        return self.linear(states)


def min_cosine(states: Tensor, exact: Tensor, packed: PackedBatch) -> float:
    """Return the lowest cosine between vectors of `states` and of `exact`, both `[T, width]`.

    For each text it compares the first token's state, the last one's, and the mean.
    """
    lowest = 1.0
    for start, stop in pairwise(packed.offsets[: len(packed.unpack_order) + 1].tolist()):
        vectors, expected = (
            torch.stack([text[0], text[-1], text.mean(0)])
            for text in (states[start:stop].float(), exact[start:stop].float())
        )
        lowest = min(lowest, float(functional.cosine_similarity(vectors, expected).min()))
    return lowest


def warn_if_inexact(name: str, states: Tensor, exact: Tensor, packed: PackedBatch) -> None:
    """Log a warning if vectors in 8 bits are further than usual from those of `exact` states."""
    lowest = min_cosine(states, exact, packed)
    if not lowest >= _MIN_COSINE:
        log.warning(
            "int8_differs",
            model=name,
            cosine=round(lowest, 4),
            detail="in 8 bits a vector of this model is further than usual from the one in float32 "
            f"(cosine {lowest:.4f}, usual are {_MIN_COSINE} and more); DTYPE=auto is more exact",
        )


def _choose_columns(states: Tensor, readers: Sequence[nn.Linear]) -> tuple[Tensor, Columns]:
    """Choose the divisor of each channel, `[in]`, and the columns of the divided channels."""
    states = states.float()
    size = states.square().mean(0).sqrt()
    size = size.clamp_min(_MIN_SIZE * float(size.max())).clamp_min(_TINY)
    weights = torch.stack([_max_abs_of_columns(layer.weight.detach()) for layer in readers])
    divisor = size**_SMOOTHING / weights.amax(0).float().clamp_min(_TINY) ** (1 - _SMOOTHING)

    largest, channels = _max_abs_of_columns(states) / divisor, list(range(len(divisor)))
    # The number of columns of each channel, and each column's index among those of its channel.
    counts, indices = torch.ones(len(divisor)), torch.zeros(len(divisor)).tolist()
    steps = -(-len(divisor) // (_CHANNELS_PER_REPEAT * _REPEAT_MULTIPLE))
    for _ in range(steps * _REPEAT_MULTIPLE):
        channel = int((largest / counts).argmax())
        channels.append(channel)
        indices.append(float(counts[channel]))
        counts[channel] += 1
    repeated = torch.tensor(channels[len(divisor) :], dtype=torch.int32)
    offsets = (torch.tensor(indices) + 0.5) / counts[channels]
    return divisor, Columns(1 / (divisor * counts), repeated, offsets)


def _max_abs_of_columns(matrix: Tensor) -> Tensor:
    # `abs` would make a large temporary tensor.
    return torch.maximum(matrix.amax(0), -matrix.amin(0))


def _quantize_block(weight: Tensor, columns: Columns, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round weights to s8 up to `limit`.

    Returns the values `[out, columns]`, and for each output channel its scale and its scaled sum.
    """
    scale = weight.abs().amax(1).clamp_min(_TINY) / limit
    values = columns.spread(weight / scale[:, None])
    # float32 is exact for whole numbers below 2^24, and is summed faster than bytes.
    return values.to(torch.int8), scale, scale * values.sum(1)


@torch.inference_mode()
def make_quantized_encoder(
    weights: Weights,
    config: EncoderConfig,
    target: Target,
    texts: Sequence[TokenIds],
) -> Encoder:
    """Make an encoder that computes products in 8 bits, and the rest in the target's dtype.

    It is quantized for texts like these. For some of them the layers are also computed in float32,
    to log a warning if the vectors differ.
    """
    pack_texts = partial(pack, device=target.device, positions=config.position_scheme)
    calibration, compared = pack_texts(texts), pack_texts(texts[1::_COMPARED_EVERY])
    backend, dtype, reference = target.backend, target.dtype, unprepared_backend()
    # In float32, so that the weights in the file are rounded only once.
    weights = weights.to(target.device, torch.float32)
    embeddings, layers = read_embeddings(weights, config, backend, dtype), []
    states, exact = embeddings(calibration), embeddings(compared).float()
    with calibrating_backend(backend, dtype) as int8_backend:
        for index in range(config.layers):
            layer_weights = weights.caching()
            layer = bert.read_layer(layer_weights, config, index, int8_backend)
            states = layer(states, calibration, backend.attention)
            layers.append(_finish_layer(layer, backend))
            float32_layer = bert.read_layer(layer_weights, config, index, reference)
            exact = float32_layer(exact, compared, reference.attention)
            del layer_weights, float32_layer  # Frees them before the next layer is read.
    encoder = Encoder(layers, backend.attention, embeddings)
    warn_if_inexact(weights.folder.name, encoder(compared), exact, compared)
    return encoder


def _finish_layer(layer: EncoderLayer, backend: Backend) -> EncoderLayer:
    """Make the layer of its calibrated products, in one or two calls if the backend can."""
    names = ("to_query_key_value", "from_attended", "to_inner", "from_inner")
    products = {name: getattr(layer.parts, name).linear for name in names}
    return EncoderLayer.of(replace(layer.parts, backend=backend, **products))


@torch.inference_mode()
def make_quantized_decoder(
    weights: Weights, config: DecoderConfig, target: Target, texts: Sequence[TokenIds]
) -> Decoder:
    """Make a decoder as `make_quantized_encoder` does.

    For all texts the layers are also computed in float32.
    """
    calibration = pack(texts, device=target.device)
    backend, dtype, reference = target.backend, target.dtype, unprepared_backend()
    weights = weights.to(target.device, torch.float32)
    table, norm = read_ends(weights, config, dtype)
    positions = calibration.position_ids[0]
    rotary = RotaryEmbedding.at(positions, config.head_width, config.theta)
    states = functional.embedding(calibration.input_ids[0], table)
    exact, layers = states.float(), []
    with calibrating_backend(backend, dtype) as int8_backend:
        for index in range(config.layers):
            layer_weights = weights.caching()
            float32_layer = qwen3.read_layer(layer_weights, config, index, reference)
            exact = float32_layer(exact, calibration, reference.attention, rotary)
            layers.append(qwen3.read_layer(layer_weights, config, index, int8_backend, dtype))
            states = layers[-1](states, calibration, backend.attention, rotary)
            del layer_weights, float32_layer
    final_norm = RmsNorm(norm, config.epsilon)
    exact_norm = RmsNorm(norm.float(), config.epsilon)
    warn_if_inexact(weights.folder.name, final_norm(states), exact_norm(exact), calibration)
    return Decoder(layers, backend.attention, table, final_norm, config.head_width, config.theta)
