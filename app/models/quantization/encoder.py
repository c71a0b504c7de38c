"""BERT's and RoBERTa's encoder with every product in 8 bits, made from parameters in float32.

Between the layers the states are levels in float32: each channel in the unit in which the next
products read it, from `ZERO` on. The norm before them gives them so.

How wide a unit has to be is seen on texts for calibration. They run through each layer as soon as
it is made, so that every weight is read once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from app.models.architectures.bert.embeddings import Embeddings
from app.models.architectures.bert.encoder import Encoder, Step, attend
from app.models.architectures.bert.parameters import EncoderParameters
from app.models.architectures.layers import in_blocks
from app.models.attention.choose import Kernel
from app.models.batch.packing import PackedBatch
from app.models.quantization.linear import FromNorm, ToNorm, as_levels, choose_unit, to_levels


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """`app.models.architectures.bert.encoder.Layer` in 8 bits; states come and go as levels."""

    heads: int
    to_query_key_value: FromNorm
    from_attended: ToNorm
    to_inner: FromNorm
    from_inner: ToNorm

    def __call__(self, states: Tensor, packed: PackedBatch, kernel: Kernel) -> Tensor:
        """The next states."""
        attended = attend(self.to_query_key_value(states), self.heads, packed, kernel)
        return in_blocks(self._feed_forward, attended, states)

    def _feed_forward(self, attended: Tensor, states: Tensor) -> Tensor:
        states = self.from_attended(attended, states)
        return self.from_inner(self.to_inner(states), states)

    def ending_in(self, unit: Tensor) -> Self:
        """The same with the next states in levels of `unit`."""
        return replace(self, from_inner=self.from_inner.ending_in(unit))


def make_quantized_encoder(
    parameters: EncoderParameters, kernel: Kernel, dtype: torch.dtype, calibration: PackedBatch
) -> Encoder:
    """The encoder with `parameters`, which are float32, in units that fit the `calibration` texts.

    Attention runs in `dtype`, which is also that of the result.
    """
    embeddings = _own_embeddings(parameters.embeddings(), dtype)
    with torch.inference_mode():
        made = _layers(parameters, kernel, dtype, calibration, embeddings(calibration))
        units, layers = zip(*made, strict=True)
    embeddings = replace(embeddings, norm=as_levels(embeddings.norm, units[0]))
    steps: list[Step] = [
        *(layer.ending_in(unit) for layer, unit in zip(layers[:-1], units[1:], strict=True)),
        layers[-1],
    ]
    return Encoder(embeddings, steps, kernel, dtype)


def _own_embeddings(embeddings: Embeddings, dtype: torch.dtype) -> Embeddings:
    # Copies, because a view of one tensor keeps the whole file mapped.
    return replace(
        embeddings,
        tokens=embeddings.tokens.copied_to(dtype),
        positions=embeddings.positions.clone(),
        type=embeddings.type.clone(),
    )


def _layers(
    parameters: EncoderParameters,
    kernel: Kernel,
    dtype: torch.dtype,
    packed: PackedBatch,
    states: Tensor,
) -> Iterator[tuple[Tensor, QuantizedLayer]]:
    """Each layer, its last norm not in levels yet, and the unit of what it reads.

    `states` are those of `packed` that the first layer reads.
    """
    config = parameters.config
    for exact in map(parameters.layer, range(config.layers)):
        before = choose_unit(_reach(states), exact.projections)
        project = FromNorm(exact.projections, before, dtype=dtype)
        join = ToNorm(exact.attended, before, exact.attention_norm)
        levels = to_levels(states, before)
        states = join(attend(project(levels), config.heads, packed, kernel), levels)

        between = choose_unit(_reach(states), [exact.inner])
        widen = FromNorm([exact.inner], between, activation=config.activation)
        narrow = ToNorm(exact.output, between, exact.output_norm)
        levels = to_levels(states, between)
        states = narrow(widen(levels), levels)

        yield before, QuantizedLayer(config.heads, project, join.ending_in(between), widen, narrow)


def _reach(states: Tensor) -> Tensor:
    return states.abs().amax(0)
