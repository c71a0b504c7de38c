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

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from smart_embedder.models.batch import PackedBatch
from smart_embedder.models.checkpoint.weights import Weights
from smart_embedder.models.families.bert import (
    Encoder,
    EncoderConfig,
    EncoderLayer,
    read_embeddings,
    read_layer,
    self_attention,
)
from smart_embedder.models.ops.backend import (
    Backend,
    Columns,
    EncoderParts,
    QuantizedLinear,
    QuantizedWeights,
)

_TINY = 1e-30
# How far the division follows the size of the activations (1), or that of the weights (0).
_SMOOTHING = 0.4
# The least size of a channel's activations, as a share of the largest: calibration texts may not
# have used it at all.
_LEAST_SIZE = 1e-3
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
    divisor, columns = _choose(states, layers)
    rows = max(1, _WEIGHTS_AT_ONCE // len(columns.offsets))
    blocks = (block for each in layers for block in torch.split(each.weight.detach(), rows))
    limit = backend.int8_weight_limit
    quantized = (_quantize(block.float() * divisor, columns, limit) for block in blocks)
    values, scale, sums = map(torch.cat, zip(*quantized, strict=True))
    bias = torch.cat([layer.bias.detach().float() for layer in layers])
    weights = QuantizedWeights(values, scale, sums, bias)
    return QuantizedLinear(columns, backend.int8_gemm(weights, dtype, activation), backend)


def _choose(states: Tensor, readers: Sequence[nn.Linear]) -> tuple[Tensor, Columns]:
    """`[in]`: what each channel of states is divided by, and the columns that they become then."""
    states = states.float()
    size = states.square().mean(0).sqrt()
    size = size.clamp_min(_LEAST_SIZE * float(size.max())).clamp_min(_TINY)
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


def _quantize(weight: Tensor, columns: Columns, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values `[out, columns]` s8 to `limit`, their scale `[out]`, and the rows' sums times it."""
    scale = weight.abs().amax(1).clamp_min(_TINY) / limit
    values = columns.spread(weight / scale[:, None])
    # Below 2^24 float32 is exact in whole numbers, and sums them faster than bytes are summed.
    return values.to(torch.int8), scale, scale * values.sum(1)


@torch.inference_mode()
def make_quantized_encoder(
    weights: Weights,
    config: EncoderConfig,
    backend: Backend,
    dtype: torch.dtype,
    calibration: PackedBatch,
) -> Encoder:
    """The encoder with `weights`, which are float32, for texts like those of `calibration`.

    All but the products is in `dtype`.
    """
    prepare = partial(quantize, backend=backend, dtype=dtype)
    embeddings, layers = read_embeddings(weights, config, backend, dtype), []
    states = embeddings(calibration)
    for index in range(config.layers):
        exact = read_layer(weights, config, index)
        project = prepare(exact.projections, states)
        projected = project(states)
        attended = self_attention(projected, config.heads, calibration, backend.attention)
        join = prepare([exact.attended], attended)
        states = backend.add_norm(join(attended), states, exact.attention_norm)

        widen = prepare([exact.inner], states, activation=config.activation)
        inner = widen(states)
        narrow = prepare([exact.output], inner)
        states = backend.add_norm(narrow(inner), states, exact.output_norm)
        parts = EncoderParts(
            backend, config.heads, project, join, exact.attention_norm, widen, narrow,
            exact.output_norm,
        )  # fmt: skip
        layers.append(EncoderLayer.of(parts))
    return Encoder(layers, backend.attention, embeddings, dtype)
