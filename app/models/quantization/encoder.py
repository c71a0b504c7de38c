"""BERT's and RoBERTa's encoder with every product in 8 bits, made from parameters in float32.

Between the layers the states are float32 in the steps in which the next products read them, as
`Steps.take` gives them: the norm before them does it.

The steps are chosen from the range of the states on texts for calibration. Those run through each
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
    Steps,
    choose_factors,
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

    def with_output_in(self, steps: Steps) -> Self:
        """The same with the next states in `steps`."""
        return replace(self, from_inner=self.from_inner.with_output_in(steps))


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
        steps, layers = zip(*quantized, strict=True)
    embeddings = replace(embeddings, norm=steps[0].taken_by(embeddings.norm))
    joined = [
        layer.with_output_in(next_steps)
        for layer, next_steps in zip(layers[:-1], steps[1:], strict=True)
    ]
    return Encoder([*joined, layers[-1]], backend.attend, embeddings, dtype)


def _quantize_layers(
    parameters: EncoderParameters,
    backend: Backend,
    dtype: torch.dtype,
    packed: PackedBatch,
    states: Tensor,
) -> Iterator[tuple[Steps, QuantizedLayer]]:
    """Each layer, whose output is in no steps yet, and the steps of its input.

    `states` are those of `packed` that the first layer reads.
    """
    config = parameters.config
    for exact in map(parameters.layer, range(config.layers)):
        input_steps = Steps.choose(states, exact.projections)
        project = StaticLinear(exact.projections, input_steps, backend, dtype=dtype)
        taken = input_steps.take(states)
        attended = self_attention(project(taken), config.heads, packed, backend.attend)
        factors = choose_factors(attended, exact.attended)
        join = DynamicLinear(exact.attended, factors, input_steps, exact.attention_norm, backend)
        states = join(attended, taken)

        inner_steps = Steps.choose(states, [exact.inner])
        widen = StaticLinear([exact.inner], inner_steps, backend, activation=config.activation)
        taken = inner_steps.take(states)
        inner = widen(taken)
        factors = choose_factors(inner, exact.output)
        narrow = DynamicLinear(exact.output, factors, inner_steps, exact.output_norm, backend)
        states = narrow(inner, taken)

        join = join.with_output_in(inner_steps)
        yield input_steps, QuantizedLayer(config.heads, project, join, widen, narrow)
