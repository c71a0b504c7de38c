"""BERT's and RoBERTa's encoder with every product in 8 bits, made from parameters in float32.

Between the layers the states are levels in float32: each channel in the unit in which the next
products read it, from `ZERO` on. The norm before them gives them so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from app.models.attention import Kernel
from app.models.embeddings import Embeddings
from app.models.encoder import Encoder, Step, attend, in_blocks
from app.models.encoder_parameters import EncoderParameters, LayerParameters
from app.models.int8 import ZERO, FromNorm, ToNorm, choose_unit
from app.models.norm import Norm
from app.models.packing import PackedBatch
from app.models.reach import Reach, reach_of


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """`app.models.encoder.Layer` in 8 bits; states come and go as levels."""

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


def make_quantized_encoder(
    parameters: EncoderParameters, kernel: Kernel, dtype: torch.dtype, calibration: PackedBatch
) -> Encoder:
    """The encoder with `parameters`, which are float32, in units that fit the `calibration` texts.

    Attention runs in `dtype`, which is also that of the result and of the calibration.
    """
    exact = parameters.embeddings()
    with torch.inference_mode():
        reach = reach_of(parameters.rounded_to(dtype), kernel, calibration)
    units = list(_units(parameters, reach))
    activation = parameters.config.activation
    layers: list[Step] = [
        _quantize(parameters.layer(index), parameters.config.heads, activation, dtype, of_layer)
        for index, of_layer in enumerate(units)
    ]
    return Encoder(_embeddings(exact, dtype, units[0].before), layers, kernel, dtype)


@dataclass(frozen=True, slots=True)
class _Units:
    """Those of the states before a layer, between its halves and after it (the last has none)."""

    before: Tensor
    between: Tensor
    after: Tensor | None


def _units(parameters: EncoderParameters, reach: Reach) -> Iterator[_Units]:
    layers = map(parameters.layer, range(parameters.config.layers))
    units = [
        (choose_unit(before, layer.projections), choose_unit(between, [layer.inner]))
        for before, between, layer in zip(reach.before, reach.between, layers, strict=True)
    ]
    following = [before for before, _ in units[1:]]
    for (before, between), after in zip(units, [*following, None], strict=True):
        yield _Units(before, between, after)


def _embeddings(exact: Embeddings, dtype: torch.dtype, unit: Tensor) -> Embeddings:
    # Copies, because a view of one tensor keeps the whole file mapped.
    return replace(
        exact,
        tokens=exact.tokens.copied_to(dtype),
        positions=exact.positions.clone(),
        type=exact.type.clone(),
        norm=_as_levels(exact.norm, unit),
    )


def _quantize(
    exact: LayerParameters, heads: int, activation: str, dtype: torch.dtype, units: _Units
) -> QuantizedLayer:
    return QuantizedLayer(
        heads=heads,
        to_query_key_value=FromNorm(exact.projections, units.before, dtype=dtype),
        from_attended=ToNorm(
            exact.attended, units.before, _as_levels(exact.attention_norm, units.between)
        ),
        to_inner=FromNorm([exact.inner], units.between, activation=activation),
        from_inner=ToNorm(exact.output, units.between, _as_levels(exact.output_norm, units.after)),
    )


def _as_levels(norm: Norm, unit: Tensor | None) -> Norm:
    if unit is None:
        return Norm(norm.weight.clone(), norm.bias.clone(), norm.epsilon)
    return Norm(norm.weight / unit, norm.bias / unit + ZERO, norm.epsilon)
