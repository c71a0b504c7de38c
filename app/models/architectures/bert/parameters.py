"""The parameters of BERT's and RoBERTa's encoder, read layer by layer under the names they have."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from app.models.architectures.bert.config import EncoderConfig
from app.models.architectures.bert.embeddings import Embeddings
from app.models.architectures.token_table import TokenTable
from app.models.checkpoint.weights import Weights
from app.models.ops.norm import Norm

_TOKENS = "embeddings.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One layer's products and norms."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    attended: nn.Linear
    attention_norm: Norm
    inner: nn.Linear
    output: nn.Linear
    output_norm: Norm

    @property
    def projections(self) -> list[nn.Linear]:
        """Query, key and value, which read the same states."""
        return [self.query, self.key, self.value]


class EncoderParameters:
    """Reads from `weights`, and brings what it reads to a device and a dtype.

    What has both already is not copied, so that it may stay mapped from its file.
    """

    def __init__(
        self, weights: Weights, config: EncoderConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        # A classifier's encoder has a name of its own before those of its parts.
        self._weights = weights.before(_TOKENS)

    def embeddings(self) -> Embeddings:
        """What the tokens are looked up in."""
        config, weights = self.config, self._weights
        types = weights.get("embeddings.token_type_embeddings.weight", config.types, config.width)
        positions = weights.get(
            "embeddings.position_embeddings.weight", config.positions, config.width
        )
        return Embeddings(
            tokens=self._token_table(),
            positions=self._bring(positions),
            type=self._bring(types[0]),
            norm=self._norm("embeddings"),
        )

    def _token_table(self) -> TokenTable:
        rows = self._weights.get(_TOKENS, self.config.vocabulary, self.config.width)
        if self.device.type != "cpu":
            rows = self._bring(rows)
        return TokenTable(rows, self.dtype, stays=rows.dtype is self.dtype)

    def layer(self, index: int) -> LayerParameters:
        """The layer number `index`."""
        width, inner_width = self.config.width, self.config.inner_width
        name = f"encoder.layer.{index}"
        return LayerParameters(
            query=self._linear(f"{name}.attention.self.query", width, width),
            key=self._linear(f"{name}.attention.self.key", width, width),
            value=self._linear(f"{name}.attention.self.value", width, width),
            attended=self._linear(f"{name}.attention.output.dense", width, width),
            attention_norm=self._norm(f"{name}.attention.output"),
            inner=self._linear(f"{name}.intermediate.dense", width, inner_width),
            output=self._linear(f"{name}.output.dense", inner_width, width),
            output_norm=self._norm(f"{name}.output"),
        )

    def _linear(self, name: str, in_features: int, out_features: int) -> nn.Linear:
        return self._weights.linear(name, in_features, out_features).to(self.device, self.dtype)

    def _norm(self, name: str) -> Norm:
        weight, bias = (
            self._weights.get(f"{name}.LayerNorm.{part}", self.config.width)
            for part in ("weight", "bias")
        )
        return Norm(self._bring_norm(weight), self._bring_norm(bias), self.config.epsilon)

    def _bring_norm(self, tensor: Tensor) -> Tensor:
        # PyTorch takes parameters that are more exact than the states on a CPU alone.
        dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        # One small tensor left as it is would keep the whole file mapped.
        return tensor.to(self.device, dtype, copy=True)

    def _bring(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)
