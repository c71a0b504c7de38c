"""BERT's and RoBERTa's encoder with every product in 8 bits, made from a model in float32.

Between the layers the states are float32 numbers in units of the step in which the next product
reads them. A layer norm undoes any unit of its input, so changing units costs nothing: the next
norm's weights hold the new one.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.models.attention import Kernel
from app.models.encoder import Embeddings, Encoder, Norm, Step, attend
from app.models.int8 import LARGEST, FromAny, FromNorm
from app.models.packing import PackedBatch

# How much farther than in the samples a row may reach before it is computed apart.
_MARGIN = 1.1


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """`app.models.encoder.Layer` in 8 bits; states come and go in units of a step."""

    heads: int
    to_query_key_value: FromNorm
    from_attended: FromAny
    attention_norm: Norm
    to_inner: FromNorm
    from_inner: FromAny
    output_norm: Norm

    def __call__(self, states: Tensor, packed: PackedBatch, kernel: Kernel) -> Tensor:
        """The next states; the given ones are overwritten."""
        attended = attend(self.to_query_key_value(states), self.heads, packed, kernel)
        states = self.attention_norm(self.from_attended(attended.float(), states))
        return self.output_norm(self.from_inner(self.to_inner(states), states))


class Steps:
    """The step of each layer norm's output, of which 127 reach a little beyond the samples."""

    def __init__(self) -> None:
        self._reach: dict[nn.Module, float] = {}

    def watch(self, model: PreTrainedModel) -> None:
        """Note how far the output of every layer norm reaches in each forward from now on."""
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_hook(self._note)

    def _note(self, module: nn.Module, _: Any, output: Tensor) -> None:
        self._reach[module] = max(self._reach.get(module, 1e-30), float(output.abs().max()))

    def after(self, norm: nn.Module) -> float:
        """The step for the output of `norm`."""
        return self._reach[norm] * _MARGIN / LARGEST


def make_quantized_encoder(
    model: PreTrainedModel, kernel: Kernel, dtype: torch.dtype, steps: Steps
) -> Encoder:
    """Take the weights of a float32 `model` over, layer by layer: it is of no use afterwards.

    Attention runs in `dtype`, which is also that of the result.
    """
    parts: Any = model
    modules = list(parts.encoder.layer)
    embedding_norm = parts.embeddings.LayerNorm
    step = steps.after(embedding_norm)
    embeddings = _embeddings(parts.embeddings, dtype, step)
    layers: list[Step] = []
    for module in modules:
        between = steps.after(module.attention.output.LayerNorm)
        after = 1.0 if module is modules[-1] else steps.after(module.output.LayerNorm)
        activation = model.config.hidden_act
        layers.append(_quantize(module, activation, dtype, (step, between, after)))
        module.to_empty(device="meta")
        step = after
    return Encoder(embeddings, layers, kernel, dtype)


def _embeddings(module: Any, dtype: torch.dtype, step: float) -> Embeddings:
    exact = Embeddings.of(module)
    # Copies, because a view of one tensor keeps the whole file mapped.
    return replace(
        exact,
        tokens=exact.tokens.to(dtype, copy=True),
        places=exact.places.clone(),
        type=exact.type.clone(),
        norm=_in_units(module.LayerNorm, 1.0, step),
    )


def _quantize(
    module: Any, activation: str, dtype: torch.dtype, steps: tuple[float, float, float]
) -> QuantizedLayer:
    """The layer that reads the first of `steps`, has the second between its halves, and so on."""
    before, between, after = steps
    attention, output = module.attention.self, module.attention.output
    projections = [attention.query, attention.key, attention.value]
    return QuantizedLayer(
        heads=attention.num_attention_heads,
        to_query_key_value=FromNorm(projections, before, dtype=dtype),
        from_attended=FromAny(output.dense, before),
        attention_norm=_in_units(output.LayerNorm, before, between),
        to_inner=FromNorm([module.intermediate.dense], between, activation=activation),
        from_inner=FromAny(module.output.dense, between),
        output_norm=_in_units(module.output.LayerNorm, between, after),
    )


def _in_units(module: Any, before: float, after: float) -> Norm:
    """The norm that reads states in units of `before` and gives them in units of `after`."""
    norm = Norm.of(module)
    return Norm(norm.weight / after, norm.bias / after, norm.epsilon / before**2)
