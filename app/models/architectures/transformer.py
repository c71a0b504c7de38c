"""What encoders and decoders share: parameters, token embedding, the loop over layers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from app.engine.devices.device_threads import run_preempting_call
from app.models.attention.reference import Attention
from app.models.batch.packing import PackedBatch
from app.models.checkpoint.weights import Weights

_ROWS_PER_THREAD = 256
_DEPTH_RATIO = 12


class Parameters(ABC):
    """Reads parameters from `weights`, to a device and in a dtype."""

    def __init__(
        self, weights: Weights, device: torch.device, dtype: torch.dtype, *, tokens: str
    ) -> None:
        self.device = device
        self.dtype = dtype
        # In a model with a head, all names but the head's have a prefix, which that of `tokens`
        # has.
        self._weights = weights.before(tokens)
        self._tokens = tokens

    def compare_shapes(self) -> None:
        """Raise `StartupError` where a tensor is missing or of another shape; none is read.

        Sizes that are wrong would otherwise be computed with first.
        """
        shapes = copy(self)
        shapes.device = torch.device("meta")
        shapes._weights = replace(self._weights, shapes_only=True)  # noqa: SLF001 - its own
        shapes._get_all()  # noqa: SLF001 - its own

    @abstractmethod
    def _get_all(self) -> None:
        """Get every parameter once."""

    def _get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self._weights.get(name, *shape, dtype=dtype or self.dtype).to(self.device)

    def _linear(
        self, name: str, in_features: int, out_features: int, *, bias: bool = True
    ) -> nn.Linear:
        linear = self._weights.linear(name, in_features, out_features, bias=bias, dtype=self.dtype)
        return linear.to(self.device)


class Transformer(ABC):
    """Maps a packed batch to the hidden state of every token.

    `shares_prefixes`: common prefixes are computed once. `capturable`: a forward can be captured as
    a CUDA graph. `rounds_up`: a forward accepts rows that belong to no sequence. `window`: the
    attention window of some layers, if there is one.
    """

    shares_prefixes: ClassVar[bool] = False
    capturable: ClassVar[bool] = True
    rounds_up = True
    window: int | None = None

    @abstractmethod
    def __call__(self, packed: PackedBatch) -> Tensor:
        """`[T, hidden]`: the last hidden state of every token."""

    @abstractmethod
    def with_attention(self, change: Callable[[Attention], Attention]) -> Self:
        """A copy whose attention is `change` of this one's."""

    @abstractmethod
    def with_fewer_layers(self) -> tuple[Self, float]:
        """A copy with only the first layers, and by what factor this one has more."""


@dataclass(frozen=True, slots=True)
class LayeredTransformer(Transformer):
    """Layers, one after the other, which are called with states, batch and attention."""

    layers: Sequence[Callable[..., Tensor]]
    attend: Attention

    def run_layers(self, states: Tensor, packed: PackedBatch, *others: Any) -> Tensor:
        """The states after the last layer; each layer is called with `others`, too."""
        for layer in self.layers:
            preemption_point()
            states = layer(states, packed, self.attend, *others)
        return states

    def with_attention(self, change: Callable[[Attention], Attention]) -> Self:
        """Implement `Transformer`."""
        return replace(self, attend=change(self.attend))

    def with_fewer_layers(self) -> tuple[Self, float]:
        """Implement `Transformer`: enough layers to measure the cost of all."""
        few: Any = self.layers[: max(2, len(self.layers) // _DEPTH_RATIO)]
        return replace(self, layers=few), len(self.layers) / len(few)


def in_row_blocks(step: Callable[..., Tensor], states: Tensor, *others: Tensor) -> Tensor:
    """Compute `step`, which treats each row by itself, on a CPU for a few rows at a time.

    Its intermediate results then fit the cache. From 32 MiB on the allocator would also return them
    to the system each time, and new pages cost more than a pass over them.
    """
    at_once = _ROWS_PER_THREAD * torch.get_num_threads()
    if states.device.type != "cpu" or len(states) <= at_once:
        return step(states, *others)
    blocks = (torch.split(each, at_once) for each in (states, *others))
    outputs = []
    for block in zip(*blocks, strict=True):
        preemption_point()
        outputs.append(step(*block))
    return torch.cat(outputs)


def preemption_point() -> None:
    """Run a short forward that waits for this thread, if there is one."""
    threads = torch.get_num_threads()
    if run_preempting_call():
        torch.set_num_threads(threads)
