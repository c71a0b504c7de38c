"""The parameters of Qwen3's decoder, read layer by layer under the names they have."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from app.models.architectures.qwen3.config import DecoderConfig
from app.models.architectures.token_table import TokenTable
from app.models.checkpoint.weights import Weights
from app.models.ops.decoder_rows import RmsNorm

_TOKENS = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class DecoderLayerParameters:
    """One layer's products and norms; those of queries and keys are for each head."""

    input_norm: RmsNorm
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    query_norm: RmsNorm
    key_norm: RmsNorm
    attended: nn.Linear
    inner_norm: RmsNorm
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear


class DecoderParameters:
    """Reads from `weights`, and brings what it reads to a device and a dtype.

    What has both already is not copied, so that it may stay mapped from its file.
    """

    def __init__(
        self, weights: Weights, config: DecoderConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        # A model with a vocabulary's head has a name of its own before those of its parts.
        self._weights = weights.before(_TOKENS)

    def tokens(self) -> TokenTable:
        """What tokens are looked up in."""
        rows = self._weights.get(_TOKENS, self.config.vocabulary, self.config.width)
        if self.device.type != "cpu":
            rows = rows.to(self.device, self.dtype)
        return TokenTable(rows, self.dtype, stays=rows.dtype is self.dtype)

    def final_norm(self) -> RmsNorm:
        """What the last layer's states go through."""
        return self._norm("norm", self.config.width)

    def layer(self, index: int) -> DecoderLayerParameters:
        """The layer number `index`."""
        config = self.config
        width, inner_width, head = config.width, config.inner_width, config.head_width
        queries, keys = config.heads * head, config.key_heads * head
        name = f"layers.{index}"
        return DecoderLayerParameters(
            input_norm=self._norm(f"{name}.input_layernorm", width),
            query=self._linear(f"{name}.self_attn.q_proj", width, queries),
            key=self._linear(f"{name}.self_attn.k_proj", width, keys),
            value=self._linear(f"{name}.self_attn.v_proj", width, keys),
            query_norm=self._norm(f"{name}.self_attn.q_norm", head),
            key_norm=self._norm(f"{name}.self_attn.k_norm", head),
            attended=self._linear(f"{name}.self_attn.o_proj", queries, width),
            inner_norm=self._norm(f"{name}.post_attention_layernorm", width),
            gate=self._linear(f"{name}.mlp.gate_proj", width, inner_width),
            up=self._linear(f"{name}.mlp.up_proj", width, inner_width),
            down=self._linear(f"{name}.mlp.down_proj", inner_width, width),
        )

    def _linear(self, name: str, in_features: int, out_features: int) -> nn.Linear:
        layer = self._weights.linear(name, in_features, out_features, bias=False)
        return layer.to(self.device, self.dtype)

    def _norm(self, name: str, width: int) -> RmsNorm:
        weight: Tensor = self._weights.get(f"{name}.weight", width)
        # One small tensor left as it is would keep the whole file mapped.
        return RmsNorm(weight.to(self.device, self.dtype, copy=True), self.config.epsilon)


def vocabulary_head(weights: Weights, config: DecoderConfig) -> Tensor:
    """`[vocabulary, width]`, as it lies in the file."""
    shape = config.vocabulary, config.width
    if config.tied:
        return weights.before(_TOKENS).get(_TOKENS, *shape)
    return weights.get("lm_head.weight", *shape)
