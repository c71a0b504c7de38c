"""BERT's and RoBERTa's encoder with every product in 8 bits, made from parameters in float32.

Between the layers the states are float32 in steps of the scale in which the next products read
them, as `to_steps` gives them: the norm before them does it.

The scales are chosen from the range of the states on texts for calibration. Those run through each
layer as soon as it is made, so that every weight is read once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from app.models.architectures.bert import Encoder, EncoderParameters, self_attention
from app.models.architectures.transformer import in_row_blocks
from app.models.attention.reference import Attention
from app.models.batch.packing import PackedBatch
from app.models.ops.backend import Backend
from app.models.quantization.linear import (
    DynamicLinear,
    StaticLinear,
    choose_input_scale,
    norm_to_steps,
    to_steps,
)


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """`app.models.architectures.bert.EncoderLayer` in 8 bits; states come and go in steps."""

    heads: int
    to_query_key_value: StaticLinear
    from_attended: DynamicLinear
    to_inner: StaticLinear
    from_inner: DynamicLinear

    def __call__(self, states: Tensor, packed: PackedBatch, attend: Attention) -> Tensor:
        """The next states."""
        attended = self_attention(self.to_query_key_value(states), self.heads, packed, attend)
        return in_row_blocks(self._feed_forward, attended, states)

    def _feed_forward(self, attended: Tensor, states: Tensor) -> Tensor:
        states = self.from_attended(attended, states)
        return self.from_inner(self.to_inner(states), states)

    def with_output_scale(self, scale: Tensor) -> Self:
        """The same with the next states in steps of `scale`."""
        return replace(self, from_inner=self.from_inner.with_output_scale(scale))


def make_quantized_encoder(
    parameters: EncoderParameters, backend: Backend, dtype: torch.dtype, calibration: PackedBatch
) -> Encoder:
    """The encoder with `parameters`, which are float32, in scales for the `calibration` texts.

    Attention runs in `dtype`, which is also that of the result.
    """
    embeddings = parameters.embeddings(tokens_dtype=dtype)
    with torch.inference_mode():
        states = embeddings(calibration)
        quantized = _quantize_layers(parameters, backend, dtype, calibration, states)
        scales, layers = zip(*quantized, strict=True)
    embeddings = replace(embeddings, norm=norm_to_steps(embeddings.norm, scales[0]))
    scaled = [
        layer.with_output_scale(scale) for layer, scale in zip(layers[:-1], scales[1:], strict=True)
    ]
    return Encoder([*scaled, layers[-1]], backend.attend, embeddings, dtype)


def _quantize_layers(
    parameters: EncoderParameters,
    backend: Backend,
    dtype: torch.dtype,
    packed: PackedBatch,
    states: Tensor,
) -> Iterator[tuple[Tensor, QuantizedLayer]]:
    """Each layer, whose output has no scale yet, and the scale of its input.

    `states` are those of `packed` that the first layer reads.
    """
    config = parameters.config
    for exact in map(parameters.layer, range(config.layers)):
        input_scale = choose_input_scale(_max_abs(states), exact.projections)
        project = StaticLinear(exact.projections, input_scale, backend, dtype=dtype)
        join = DynamicLinear(exact.attended, input_scale, exact.attention_norm, backend)
        steps = to_steps(states, input_scale)
        states = join(self_attention(project(steps), config.heads, packed, backend.attend), steps)

        inner_scale = choose_input_scale(_max_abs(states), [exact.inner])
        widen = StaticLinear([exact.inner], inner_scale, backend, activation=config.activation)
        narrow = DynamicLinear(exact.output, inner_scale, exact.output_norm, backend)
        steps = to_steps(states, inner_scale)
        states = narrow(widen(steps), steps)

        join = join.with_output_scale(inner_scale)
        yield input_scale, QuantizedLayer(config.heads, project, join, widen, narrow)


def _max_abs(states: Tensor) -> Tensor:
    return states.abs().amax(0)
