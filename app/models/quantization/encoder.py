"""BERT's and RoBERTa's encoder with every product in 8 bits, made from parameters in float32.

Texts for calibration run through each layer as soon as it is made, so that every weight is read
once.
"""

import torch
from torch import Tensor

from app.models.architectures.bert import (
    Encoder,
    EncoderLayer,
    EncoderLayerParameters,
    EncoderParameters,
    self_attention,
)
from app.models.batch.packing import PackedBatch
from app.models.ops.backend import Backend
from app.models.quantization.linear import QuantizedLinear


@torch.inference_mode()
def make_quantized_encoder(
    parameters: EncoderParameters, backend: Backend, dtype: torch.dtype, calibration: PackedBatch
) -> Encoder:
    """The encoder with `parameters`, which are float32, for texts like those of `calibration`.

    All but the products is in `dtype`.
    """
    embeddings = parameters.embeddings(backend.add_norm, dtype)
    states, layers = embeddings(calibration), []
    for exact in map(parameters.layer, range(parameters.config.layers)):
        layer, states = _quantize_layer(parameters, exact, backend, calibration, states)
        layers.append(layer)
    return Encoder(layers, backend.attend, embeddings, dtype)


def _quantize_layer(
    parameters: EncoderParameters,
    exact: EncoderLayerParameters,
    backend: Backend,
    packed: PackedBatch,
    states: Tensor,
) -> tuple[EncoderLayer, Tensor]:
    """The layer, and the next states of `packed`, of which it reads `states`."""
    heads, dtype, make = parameters.config.heads, states.dtype, QuantizedLinear.of
    project = make(exact.projections, states, backend, dtype)
    attended = self_attention(project(states), heads, packed, backend.attend)
    join = make([exact.attended], attended, backend, dtype)
    states = backend.add_norm(join(attended), states, exact.attention_norm)

    widen = make([exact.inner], states, backend, dtype, parameters.config.activation)
    inner = widen(states)
    narrow = make([exact.output], inner, backend, dtype)
    states = backend.add_norm(narrow(inner), states, exact.output_norm)
    layer = EncoderLayer(
        backend, heads, project, join, exact.attention_norm, widen, narrow, exact.output_norm
    )
    return layer, states
