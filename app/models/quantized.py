"""BERT's and RoBERTa's encoder with every product in 8 bits, made from a model in float32.

Between the layers the states are levels in float32: each channel in the unit in which the next
products read it, from `ZERO` on. The norm before them gives them so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.models.attention import Kernel
from app.models.encoder import Embeddings, Encoder, Norm, Step, attend, in_blocks
from app.models.int8 import ZERO, FromAny, FromNorm, choose_unit
from app.models.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """`app.models.encoder.Layer` in 8 bits; states come and go as levels."""

    heads: int
    to_query_key_value: FromNorm
    from_attended: FromAny
    attention_norm: Norm
    to_inner: FromNorm
    from_inner: FromAny
    output_norm: Norm

    def __call__(self, states: Tensor, packed: PackedBatch, kernel: Kernel) -> Tensor:
        """The next states."""
        attended = attend(self.to_query_key_value(states), self.heads, packed, kernel)
        return in_blocks(self._feed_forward, attended, states)

    def _feed_forward(self, attended: Tensor, states: Tensor) -> Tensor:
        states = self.attention_norm(self.from_attended(attended.float(), states))
        return self.output_norm(self.from_inner(self.to_inner(states), states))


class Calibration:
    """How far each channel of every layer norm's output reaches in the forwards it watches."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._reach: dict[nn.Module, Tensor] = {}
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_hook(self._note)

    def _note(self, norm: nn.Module, _: Any, output: Tensor) -> None:
        reach = output.abs().flatten(0, -2).amax(0)
        before = self._reach.get(norm)
        self._reach[norm] = reach if before is None else torch.maximum(before, reach)

    def unit(self, norm: nn.Module, readers: Sequence[nn.Linear]) -> Tensor:
        """`[hidden]`: in which `readers` should read the output of `norm`."""
        return choose_unit(self._reach[norm], readers)


def make_quantized_encoder(
    model: PreTrainedModel, kernel: Kernel, dtype: torch.dtype, calibration: Calibration
) -> Encoder:
    """Take the weights of a float32 `model` over, layer by layer: it is of no use afterwards.

    Attention runs in `dtype`, which is also that of the result.
    """
    parts: Any = model
    modules = list(parts.encoder.layer)
    norms = [parts.embeddings.LayerNorm, *(module.output.LayerNorm for module in modules)]
    units = [
        calibration.unit(norm, _projections(module))
        for norm, module in zip(norms, modules, strict=False)
    ]
    embeddings = _embeddings(parts.embeddings, dtype, units[0])
    layers: list[Step] = []
    for module, before, after in zip(modules, units, [*units[1:], None], strict=True):
        between = calibration.unit(module.attention.output.LayerNorm, [module.intermediate.dense])
        units_of_layer = _Units(before, between, after)
        layers.append(_quantize(module, model.config.hidden_act, dtype, units_of_layer))
        module.to_empty(device="meta")
    return Encoder(embeddings, layers, kernel, dtype)


@dataclass(frozen=True, slots=True)
class _Units:
    """Those of the states before a layer, between its halves and after it (the last has none)."""

    before: Tensor
    between: Tensor
    after: Tensor | None


def _embeddings(module: Any, dtype: torch.dtype, unit: Tensor) -> Embeddings:
    exact = Embeddings.of(module)
    # Copies, because a view of one tensor keeps the whole file mapped.
    return replace(
        exact,
        tokens=exact.tokens.to(dtype, copy=True),
        places=exact.places.clone(),
        type=exact.type.clone(),
        norm=_as_levels(module.LayerNorm, unit),
    )


def _quantize(module: Any, activation: str, dtype: torch.dtype, units: _Units) -> QuantizedLayer:
    attention = module.attention
    return QuantizedLayer(
        heads=attention.self.num_attention_heads,
        to_query_key_value=FromNorm(_projections(module), units.before, dtype=dtype),
        from_attended=FromAny(attention.output.dense, units.before),
        attention_norm=_as_levels(attention.output.LayerNorm, units.between),
        to_inner=FromNorm([module.intermediate.dense], units.between, activation=activation),
        from_inner=FromAny(module.output.dense, units.between),
        output_norm=_as_levels(module.output.LayerNorm, units.after),
    )


def _projections(module: Any) -> list[nn.Linear]:
    attention = module.attention.self
    return [attention.query, attention.key, attention.value]


def _as_levels(module: Any, unit: Tensor | None) -> Norm:
    norm = Norm.of(module)
    if unit is None:
        return Norm(norm.weight.clone(), norm.bias.clone(), norm.epsilon)
    return Norm(norm.weight / unit, norm.bias / unit + ZERO, norm.epsilon)
