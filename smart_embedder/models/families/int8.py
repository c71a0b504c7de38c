"""Linear layers in 8 bits for the CPU: weights by output channel, activations by row.

Weights are s8 with one scale for each output channel, activations u8 with a scale and a minimum for
each row: nothing about a row depends on the other rows of its batch. (Signed activations would be
slower: without AMX oneDNN has no fast product of s8 with s8.)

A few channels of any trained model are many times as large as the others, which they would leave
few of the 255 steps. Two things are done about them, both chosen from the states of calibration:
each channel is divided by a power of its usual size, which the weights are multiplied with
(SmoothQuant, Xiao et al. 2023); and the channels that are the largest then are spread over several
columns, which makes the range that counts narrower and their own steps finer (Zhao et al. 2019).
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
from smart_embedder.kernels.packed_batch import PackedBatch
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
# The cosine of a vector with the one in float32, at least, of models that suit 8 bits.
_MIN_COSINE = 0.995
# How far the division follows the size of the activations (1), or that of the weights (0).
_SMOOTHING = 0.4
# The least size of a channel's activations, as a share of the largest: calibration texts may not
# have used it at all.
_MIN_SIZE = 1e-3
# For so many channels there is a further column, in whole steps of the kernels.
_CHANNELS_OF_REPEAT, _REPEATS_AT_ONCE = 64, 16
# Weights rounded at once: larger temporary tensors would leave the memory full of holes.
_WEIGHTS_AT_ONCE = 2**18
# Of many scripts and kinds, to choose by their states how channels are quantized.
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
    """Quantize `layers` that read states like `states` `[T, in]`, side by side.

    Their output is in `dtype`.
    """
    divisor, columns = _choose_columns(states, layers)
    rows = max(1, _WEIGHTS_AT_ONCE // len(columns.offsets))
    blocks = (block for each in layers for block in torch.split(each.weight.detach(), rows))
    limit = backend.int8_weight_limit
    quantized = (_quantize_block(block.float() * divisor, columns, limit) for block in blocks)
    values, scale, sums = map(torch.cat, zip(*quantized, strict=True))
    bias = torch.cat([_float32_bias(layer) for layer in layers])
    weights = QuantizedWeights(values, scale, sums, bias)
    return QuantizedLinear(columns, backend.int8_gemm(weights, dtype, activation), backend)


def _float32_bias(layer: nn.Linear) -> Tensor:
    return torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach().float()


def encode_calibration(tokenizer: TextTokenizer) -> list[TokenIds]:
    """The tokens of `CALIBRATION_TEXTS`, but of those that have none."""
    return [text.ids for text in tokenizer.encode(list(CALIBRATION_TEXTS)) if len(text.ids)]


@contextmanager
def calibrating_backend(backend: Backend, dtype: torch.dtype) -> Iterator[Backend]:
    """A backend whose products are computed in 8 bits, and the rest in `dtype`.

    Each product is prepared for states like those of its first call, which should be within the
    context and those of all `CALIBRATION_TEXTS`. What none of them reaches is prepared at the end,
    for states whose channels are of one size.
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
    unreached = [each for each in products if each[0].quantize is not None]
    for product, width in unreached:
        product(torch.ones(1, width))
    if unreached:
        log.warning(
            "int8_not_calibrated",
            products=len(unreached),
            of=len(products),
            detail="no text of the calibration reaches these products of the model: if texts of "
            "yours do, their vectors may be less exact; DTYPE=auto computes them as they are",
        )


class _CalibratedLinear:
    """Implements `Linear` by what `quantize` makes for the states of the first call: `linear`."""

    def __init__(self, quantize: Callable[[Tensor], QuantizedLinear]) -> None:
        self.quantize: Callable[[Tensor], QuantizedLinear] | None = quantize
        self.linear: QuantizedLinear

    def __call__(self, states: Tensor) -> Tensor:
        if self.quantize is not None:
            self.linear = self.quantize(states)
            self.quantize = None  # It holds the weights.
        return self.linear(states)


def min_cosine(states: Tensor, exact: Tensor, packed: PackedBatch) -> float:
    """The least one of vectors of the texts with those of the `exact` states, both `[T, width]`.

    A text's vector may be made of its first token, its last, or all.
    """
    least = 1.0
    for start, stop in pairwise(packed.offsets[: len(packed.unpack_order) + 1].tolist()):
        ours, theirs = (
            torch.stack([text[0], text[-1], text.mean(0)])
            for text in (states[start:stop].float(), exact[start:stop].float())
        )
        least = min(least, float(functional.cosine_similarity(ours, theirs).min()))
    return least


def warn_if_inexact(name: str, states: Tensor, exact: Tensor, packed: PackedBatch) -> None:
    """Log where vectors of the calibration's texts differ from those of the `exact` states."""
    least = min_cosine(states, exact, packed)
    if not least >= _MIN_COSINE:
        log.warning(
            "int8_differs",
            model=name,
            cosine=round(least, 4),
            detail="in 8 bits a vector of this model is further than usual from the one in float32 "
            f"(cosine {least:.4f}, usual are {_MIN_COSINE} and more); DTYPE=auto is closer",
        )


def _choose_columns(states: Tensor, readers: Sequence[nn.Linear]) -> tuple[Tensor, Columns]:
    """`[in]`: what each channel of states is divided by, and the columns that they become then."""
    states = states.float()
    size = states.square().mean(0).sqrt()
    size = size.clamp_min(_MIN_SIZE * float(size.max())).clamp_min(_TINY)
    weights = torch.stack([_max_abs_of_columns(layer.weight.detach()) for layer in readers])
    divisor = size**_SMOOTHING / weights.amax(0).float().clamp_min(_TINY) ** (1 - _SMOOTHING)

    largest, channels = _max_abs_of_columns(states) / divisor, list(range(len(divisor)))
    counts, places = torch.ones(len(divisor)), torch.zeros(len(divisor)).tolist()
    steps = -(-len(divisor) // (_CHANNELS_OF_REPEAT * _REPEATS_AT_ONCE))
    for _ in range(steps * _REPEATS_AT_ONCE):
        channel = int((largest / counts).argmax())
        channels.append(channel)
        places.append(float(counts[channel]))
        counts[channel] += 1
    repeated = torch.tensor(channels[len(divisor) :], dtype=torch.int32)
    offsets = (torch.tensor(places) + 0.5) / counts[channels]
    return divisor, Columns(1 / (divisor * counts), repeated, offsets)


def _max_abs_of_columns(matrix: Tensor) -> Tensor:
    # Absolute values of all of them would be a large temporary tensor.
    return torch.maximum(matrix.amax(0), -matrix.amin(0))


def _quantize_block(weight: Tensor, columns: Columns, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values `[out, columns]` s8 to `limit`, their scale `[out]`, and the rows' sums times it."""
    scale = weight.abs().amax(1).clamp_min(_TINY) / limit
    values = columns.spread(weight / scale[:, None])
    # Below 2^24 float32 is exact in whole numbers, and sums them faster than bytes are summed.
    return values.to(torch.int8), scale, scale * values.sum(1)


@torch.inference_mode()
def make_quantized_encoder(
    weights: Weights,
    config: EncoderConfig,
    target: Target,
    calibration: PackedBatch,
    *,
    compared: PackedBatch,
) -> Encoder:
    """The encoder with `weights`, for texts like those of `calibration`.

    All but the products is in the target's dtype. For the texts that are `compared` the layers are
    computed in float32, too, to log where the vectors differ.
    """
    backend, dtype, reference = target.backend, target.dtype, unprepared_backend()
    # In float32, so that the weights of the file are rounded only once.
    weights = weights.to(target.device, torch.float32)
    embeddings, layers = read_embeddings(weights, config, backend, dtype), []
    states, exact = embeddings(calibration), embeddings(compared).float()
    with calibrating_backend(backend, dtype) as int8_backend:
        for index in range(config.layers):
            own = weights.keeping()
            layer = bert.read_layer(own, config, index, int8_backend)
            states = layer(states, calibration, backend.attention)
            layers.append(_finish_layer(layer, backend))
            in_float32 = bert.read_layer(own, config, index, reference)
            exact = in_float32(exact, compared, reference.attention)
            del own, in_float32  # Their weights would be in memory beside the next ones.
    encoder = Encoder(layers, backend.attention, embeddings)
    warn_if_inexact(weights.folder.name, encoder(compared), exact, compared)
    return encoder


def _finish_layer(layer: EncoderLayer, backend: Backend) -> EncoderLayer:
    """A layer with its products as the states of calibration have made them, perhaps one call."""
    names = ("to_query_key_value", "from_attended", "to_inner", "from_inner")
    products = {name: getattr(layer.parts, name).linear for name in names}
    return EncoderLayer.of(replace(layer.parts, backend=backend, **products))


@torch.inference_mode()
def make_quantized_decoder(
    weights: Weights, config: DecoderConfig, target: Target, calibration: PackedBatch
) -> Decoder:
    """The decoder with `weights`, as `make_quantized_encoder`.

    Beside it the layers are computed in float32, to log where the vectors differ.
    """
    backend, dtype, reference = target.backend, target.dtype, unprepared_backend()
    weights = weights.to(target.device, torch.float32)
    table, norm = read_ends(weights, config, dtype)
    positions = calibration.position_ids[0]
    rotary = RotaryEmbedding.at(positions, config.head_width, config.theta)
    states = functional.embedding(calibration.input_ids[0], table)
    exact, layers = states.float(), []
    with calibrating_backend(backend, dtype) as int8_backend:
        for index in range(config.layers):
            own = weights.keeping()
            layer = qwen3.read_layer(own, config, index, reference)
            exact = layer(exact, calibration, reference.attention, rotary)
            layers.append(qwen3.read_layer(own, config, index, int8_backend, dtype))
            states = layers[-1](states, calibration, backend.attention, rotary)
            del own, layer
    final_norm = RmsNorm(norm, config.epsilon)
    exact_norm = RmsNorm(norm.float(), config.epsilon)
    warn_if_inexact(weights.folder.name, final_norm(states), exact_norm(exact), calibration)
    return Decoder(layers, backend.attention, table, final_norm, config.head_width, config.theta)
