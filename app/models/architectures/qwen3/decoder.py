"""Qwen3's decoder as a plain loop over packed tokens, for texts that are read and not continued.

It computes what transformers' own modules compute, which the tests compare it with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from app.models.architectures.layers import few_of, in_blocks
from app.models.architectures.qwen3.parameters import DecoderParameters
from app.models.architectures.token_table import TokenTable
from app.models.attention.choose import Kernel
from app.models.batch.packing import PackedBatch
from app.models.ops.decoder_rows import DecoderRows, RmsNorm, Rotation
from app.models.ops.linear import Linear, make_linear
from app.models.ops.native_decoder_rows import choose_decoder_rows


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: attention and feed-forward, each read from a norm and added to its input.

    `head_norm` is that of the heads of queries and keys, `[heads + key_heads, width]`.
    """

    key_heads: int
    rows: DecoderRows
    input_norm: RmsNorm
    to_query_key_value: Linear
    head_norm: RmsNorm
    from_attended: Linear
    inner_norm: RmsNorm
    to_gate_up: Linear
    from_inner: Linear

    def __call__(
        self, states: Tensor, packed: PackedBatch, kernel: Kernel, rotation: Rotation
    ) -> Tensor:
        """The next states."""
        projected = in_blocks(self._project, states, rotation.cosines, rotation.sines)
        if packed.sharing is None:
            attended = self._attend(projected, packed, kernel)
        else:
            of_all = projected.index_select(0, packed.sharing.spread)
            attended = self._attend(of_all, packed, kernel).index_select(0, packed.sharing.rows)
        return in_blocks(self._feed_forward, attended, states)

    def _project(self, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Queries, keys and values, `[T, heads + 2 key_heads, width]`."""
        width = self.head_norm.weight.shape[1]
        projected = self.to_query_key_value(self.rows.norm(states, self.input_norm))
        projected = projected.view(len(states), -1, width)
        self.rows.turn(projected, self.head_norm, Rotation(cosines, sines))
        return projected

    def _attend(self, projected: Tensor, packed: PackedBatch, kernel: Kernel) -> Tensor:
        turned, width = self.head_norm.weight.shape
        heads = [turned - self.key_heads, self.key_heads, self.key_heads]
        query, key, value = torch.split(projected.transpose(0, 1), heads)
        return kernel(query, key, value, packed, scale=width**-0.5, causal=True).flatten(1)

    def _feed_forward(self, attended: Tensor, states: Tensor) -> Tensor:
        states = self.from_attended(attended).add_(states)
        both = self.to_gate_up(self.rows.norm(states, self.inner_norm))
        return self.from_inner(self.rows.gate(both)).add_(states)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Maps a packed batch to the hidden state of every token."""

    tokens: TokenTable
    layers: Sequence[DecoderLayer]
    final_norm: RmsNorm
    kernel: Kernel
    head_width: int
    theta: float

    def __call__(self, packed: PackedBatch) -> Tensor:
        """`[T, hidden]`: the last hidden state of every token."""
        token_ids, positions, sharing = packed.input_ids[0], packed.position_ids[0], packed.sharing
        if sharing is not None:
            token_ids, positions = token_ids[sharing.rows], positions[sharing.rows]
        states = self.tokens(token_ids)
        rotation = Rotation.of(positions, self.head_width, self.theta)
        for layer in self.layers:
            states = layer(states, packed, self.kernel, rotation)
        states = self.final_norm(states)
        return states if sharing is None else states.index_select(0, sharing.spread)

    def settle(self) -> None:
        """Copy what was left in the file; forwards may run beside it."""
        self.tokens.settle()

    def shallow(self) -> "Decoder":
        """The same with few of its layers, each of which costs what any other does."""
        return replace(self, layers=few_of(self.layers))


def make_decoder(parameters: DecoderParameters, kernel: Kernel) -> Decoder:
    """The decoder with the parameters of a checkpoint, in their dtype and on their device."""
    config = parameters.config
    rows = choose_decoder_rows(parameters.device, parameters.dtype, config.inner_width)
    return Decoder(
        parameters.tokens(),
        [_make_layer(parameters, index, rows) for index in range(config.layers)],
        parameters.final_norm(),
        kernel,
        config.head_width,
        config.theta,
    )


def _make_layer(parameters: DecoderParameters, index: int, rows: DecoderRows) -> DecoderLayer:
    config, layer = parameters.config, parameters.layer(index)
    return DecoderLayer(
        key_heads=config.key_heads,
        rows=rows,
        input_norm=layer.input_norm,
        to_query_key_value=make_linear([layer.query, layer.key, layer.value]),
        head_norm=_join_norms(layer.query_norm, config.heads, layer.key_norm, config.key_heads),
        from_attended=make_linear([layer.attended]),
        inner_norm=layer.inner_norm,
        to_gate_up=make_linear([layer.gate, layer.up]),
        from_inner=make_linear([layer.down]),
    )


def _join_norms(query: RmsNorm, queries: int, key: RmsNorm, keys: int) -> RmsNorm:
    weights = [query.weight.expand(queries, -1), key.weight.expand(keys, -1)]
    return RmsNorm(torch.cat(weights), query.epsilon)
