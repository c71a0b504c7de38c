"""What encoders and decoders share: parameters, token embedding, the loop over layers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.engine.devices.device_threads import run_preempting_call
from app.models.attention.reference import Attention
from app.models.batch.packing import PackedBatch
from app.models.checkpoint.mapped_files import give_back_pages
from app.models.checkpoint.weights import Weights

_ROWS_PER_THREAD = 256
_DEPTH_RATIO = 12
_ROWS_COPIED_AT_ONCE = 16_384


class TokenEmbedding:
    """Maps token ids `[T]` to their rows `[T, width]` in `dtype`; half of a model like bge-m3.

    The table, `[vocabulary, width]`, may be mapped from the checkpoint's file. A forward reads few
    rows, and copying and rounding all of them takes long: `finish_loading` does that later, which
    changes no result. With `stays_mapped` the table is never copied. `give_back_pages` releases the
    pages of the file that were read.
    """

    def __init__(
        self,
        table: Tensor,
        dtype: torch.dtype,
        *,
        stays_mapped: bool,
        give_back_pages: Callable[[], None] = lambda: None,
    ) -> None:
        self._table = table
        self._dtype = dtype
        self._stays_mapped = stays_mapped
        self._give_back_pages = give_back_pages

    def __call__(self, token_ids: Tensor) -> Tensor:
        """The rows of the tokens, rounded."""
        return functional.embedding(token_ids, self._table).to(self._dtype)

    def copied_to(self, dtype: torch.dtype) -> "TokenEmbedding":
        """The same in `dtype`, which `finish_loading` copies."""
        return TokenEmbedding(
            self._table, dtype, stays_mapped=False, give_back_pages=self._give_back_pages
        )

    def finish_loading(self) -> None:
        """Copy the table; lookups may run meanwhile."""
        if not self._stays_mapped:
            self._table = self._copied()
            self._stays_mapped = True

    def _copied(self) -> Tensor:
        """A copy in `dtype`, made in parts, so that not all pages of the file are in memory."""
        copied = torch.empty_like(self._table, dtype=self._dtype)
        for start in range(0, len(copied), _ROWS_COPIED_AT_ONCE):
            rows = slice(start, start + _ROWS_COPIED_AT_ONCE)
            copied[rows] = self._table[rows]
            self._give_back_pages()
        return copied


class Parameters:
    """Reads parameters from `weights`, and copies them to a device and a dtype.

    A parameter that has both already is not copied, and stays mapped from its file.
    """

    def __init__(
        self, weights: Weights, device: torch.device, dtype: torch.dtype, *, tokens: str
    ) -> None:
        self.device = device
        self.dtype = dtype
        # In a model with a head, all names but the head's have a prefix, which that of `tokens`
        # has.
        self._weights = weights.before(tokens)
        self._tokens = tokens

    def _token_embedding(self, vocabulary: int, width: int) -> TokenEmbedding:
        table = self._weights.get(self._tokens, vocabulary, width)
        if self.device.type != "cpu":
            table = table.to(self.device, self.dtype)
        return TokenEmbedding(
            table,
            self.dtype,
            stays_mapped=table.dtype is self.dtype,
            # Not the weights' own method, which would keep all of them mapped.
            give_back_pages=partial(give_back_pages, self._weights.files),
        )

    def _linear(
        self, name: str, in_features: int, out_features: int, *, bias: bool = True
    ) -> nn.Linear:
        linear = self._weights.linear(name, in_features, out_features, bias=bias)
        return linear.to(self.device, self.dtype)

    def _norm_parameter(self, name: str, width: int, dtype: torch.dtype) -> Tensor:
        # One small tensor left as it is would keep the whole file mapped.
        return self._weights.get(name, width).to(self.device, dtype, copy=True)


class InputEmbeddings(Protocol):
    """The embedding, which makes the first layer's input."""

    def finish_loading(self) -> None:
        """Copy a table that is still mapped; lookups may run meanwhile."""


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
    def finish_loading(self) -> None:
        """Copy weights that are still mapped; forwards may run meanwhile."""

    @abstractmethod
    def with_attention(self, change: Callable[[Attention], Attention]) -> Self:
        """A copy whose attention is `change` of this one's."""

    @abstractmethod
    def with_fewer_layers(self) -> tuple[Self, float]:
        """A copy with only the first layers, and by what factor this one has more."""


@dataclass(frozen=True, slots=True)
class LayeredTransformer(Transformer):
    """Layers behind an embedding, one after the other."""

    embeddings: InputEmbeddings
    layers: Sequence[Callable[..., Tensor]]
    attend: Attention

    def run_layers(self, states: Tensor, packed: PackedBatch, *others: Any) -> Tensor:
        """The states after the last layer; each layer is called with `others`, too."""
        for layer in self.layers:
            preemption_point()
            states = layer(states, packed, self.attend, *others)
        return states

    def finish_loading(self) -> None:
        """Implement `Transformer`."""
        self.embeddings.finish_loading()

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
