"""What all families of transformers share: how they are called.

A `Backbone` is a transformer on its `Target`, which maps a packed batch to the hidden state of
every token. Families derive from `Transformer`; what becomes of the states is a matter of
`smart_embedder.models.heads`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from smart_embedder.errors import StartupError
from smart_embedder.hardware.cpu import cat_in_large_pages, set_threads
from smart_embedder.interrupts import run_preempting_call
from smart_embedder.kernels.attention import Attention, QueryKeyValue, exclude_unattended
from smart_embedder.kernels.backend import NATIVE
from smart_embedder.kernels.native import use_row_linear
from smart_embedder.kernels.packed_batch import End, PackedBatch, PositionScheme, pack
from smart_embedder.kernels.proof import TOLERANCES
from smart_embedder.kernels.target import ATTENTION, Target
from smart_embedder.models.cuda_graphs import (
    GRAPHS,
    LAUNCH,
    PLAIN,
    GraphedForwards,
    GraphTrial,
    make_buckets,
)
from smart_embedder.tokens import TokenIds

# The cost of all layers is measured with one in so many of them.
_DEPTH_RATIO = 12
# Rows of a thread that `run_in_row_blocks` computes at once.
_ROWS_PER_THREAD = 256
# Pairs of tokens that one call of attention scores on a CPU where sequences are long: those of a
# text of 8,192 tokens by one head, which takes 50 ms on two cores.
_SCORES_OF_A_CALL = 2**26
# oneDNN compiles a kernel for each number of rows, which takes milliseconds in bfloat16. Rounding
# up makes the numbers few, so that kernels are reused; added rows cost more the fewer rows there
# are. (Tokens above, multiple.)
_CPU_MULTIPLES = ((32, 8), (512, 32))
# Tokens of a batch of which the last layer computes only those that are read: for fewer it takes
# as long to choose them.
_WORTH_CHOOSING = 256
# Operations that a library may compute in another order for another number of rows.
_BY_BATCH = ("linear", "add_linear", "int8_gemm", ATTENTION)


class Transformer(ABC):
    """Maps a packed batch to the hidden state of every token.

    `shares_prefixes`: common prefixes are computed once. `capturable`: a forward can be captured as
    a CUDA graph. `rounds_up`: a forward accepts rows that belong to no sequence. `window`: the
    attention window of some layers, if there is one.
    """

    shares_prefixes: ClassVar[bool] = False
    capturable = True
    rounds_up = True
    window: int | None = None

    @abstractmethod
    def __call__(self, packed: PackedBatch, rows: Tensor | None = None) -> Tensor:
        """`[T, hidden]`: the last hidden state of every token, or `[R, hidden]` of those `rows`."""

    @abstractmethod
    def without_unattended(self) -> Self:
        """A copy whose attention excludes tokens that are marked as unattended."""

    def with_fewer_layers(self) -> tuple[Self, float]:
        """A copy with fewer layers, and by what factor this one has more."""
        return self, 1.0


@dataclass(frozen=True, slots=True)
class LayeredTransformer(Transformer):
    """Layers, one after the other, which are called with states, batch and attention."""

    layers: Sequence[Callable[..., Tensor]]
    attend: Attention

    def without_unattended(self) -> Self:
        """Implement `Transformer`."""
        return replace(self, attend=exclude_unattended(self.attend))

    def with_fewer_layers(self) -> tuple[Self, float]:
        """Implement `Transformer`: enough layers to measure the cost of all."""
        few: Any = self.layers[: max(2, len(self.layers) // _DEPTH_RATIO)]
        return replace(self, layers=few), len(self.layers) / len(few)


_rows_undivided = ContextVar("rows_undivided", default=False)


@contextmanager
def rows_undivided() -> Iterator[None]:
    """Within, `run_in_row_blocks` computes all rows at once, however many there are."""
    token = _rows_undivided.set(True)
    try:
        yield
    finally:
        _rows_undivided.reset(token)


def fits_one_call(tokens: int, scores: int) -> bool:
    """Whether a CPU computes attention and the products around it in one call.

    `scores` counts those of all heads. Larger batches are divided by `run_in_row_blocks` and
    `attend_by_heads`.
    """
    return tokens <= _ROWS_PER_THREAD * torch.get_num_threads() and scores <= _SCORES_OF_A_CALL


def run_in_row_blocks(step: Callable[..., Tensor], states: Tensor, *others: Tensor) -> Tensor:
    """Compute `step`, which treats each row by itself, on a CPU for a few rows at a time.

    Its intermediate results then fit the cache.
    """
    at_once = _ROWS_PER_THREAD * torch.get_num_threads()
    if states.device.type != "cpu" or len(states) <= at_once or _rows_undivided.get():
        return step(states, *others)

    def results() -> Iterator[Tensor]:
        for block in zip(*(torch.split(each, at_once) for each in (states, *others)), strict=True):
            preemption_point()
            yield step(*block)

    return cat_in_large_pages(results(), len(states))


def attend_by_heads(
    attend: Callable[[QueryKeyValue], Tensor], states: QueryKeyValue, packed: PackedBatch
) -> Tensor:
    """As `attend`, on a CPU for a few heads at a time where sequences are long.

    A short forward can then run in between; the heads do not depend on each other.
    """
    query, key, value = states
    if query.device.type != "cpu" or len(query) * packed.pairs <= _SCORES_OF_A_CALL:
        preemption_point()
        return attend(states)
    group = len(query) // len(key)
    at_once = max(1, _SCORES_OF_A_CALL // (group * packed.pairs))

    def results() -> Iterator[Tensor]:
        for start in range(0, len(key), at_once):
            preemption_point()
            keys, queries = (
                slice(times * start, times * (start + at_once)) for times in (1, group)
            )
            yield attend((query[queries], key[keys], value[keys]))

    return cat_in_large_pages(results(), len(query), dim=1)


def preemption_point() -> None:
    """Run a short forward that waits for this thread, if there is one."""
    threads = torch.get_num_threads()
    if run_preempting_call():
        torch.set_num_threads(threads)


class Backbone:
    """A transformer that maps a packed batch to the hidden state of every token.

    `max_length` is the number of positions, and `positions` says how tokens are numbered.
    `parameters` is the number of weights that each token is multiplied with. `configuration` is
    what its numbers depend on besides weights, whatever else stands in the files. With
    `reproducible` the kernels in C make the same states of a text, to the last bit, in any batch.
    """

    def __init__(
        self,
        transformer: Transformer,
        target: Target,
        *,
        hidden_size: int,
        max_length: int,
        parameters: int,
        positions: PositionScheme,
        configuration: object,
        reproducible: bool = False,
    ) -> None:
        self.target = target
        self.configuration = configuration
        self._reproducible = reproducible
        self.device = target.device
        self.dtype = target.dtype
        self.backend = target.backend
        self.hidden_size = hidden_size
        self.max_length = max_length
        self._transformer = transformer
        self._positions = positions
        self._graphs: GraphedForwards | None = None
        self._leaves_out_rows = True
        self._flop_per_token = 2 * parameters

    @property
    def reads_segments(self) -> bool:
        """Whether the tokens of the second text of a pair must be marked."""
        return self._positions.segment_offset > 0

    @property
    def reproducible(self) -> bool:
        """Whether the states of a text are the same to the last bit, whatever is beside it."""
        paths = self.target.paths
        return self._reproducible and {paths.get(each, NATIVE) for each in _BY_BATCH} == {NATIVE}

    def place_head(self, head: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """The head on the device, by default in the model's dtype.

        Where the states of a text do not depend on other texts, what it makes of them does not
        either; if that cannot be, this is not `reproducible` any more.
        """
        placed = head.to(self.device, dtype or self.dtype)
        if not self.reproducible:
            return placed
        try:
            return use_row_linear(placed)
        except ValueError:
            self._reproducible = False
            return placed

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype in which vectors are copied to the host: as exact as the model."""
        half = self.device.type == "cuda" and self.dtype is not torch.float32
        return torch.float16 if half else torch.float32

    def pack(self, sequences: list[TokenIds]) -> PackedBatch:
        """Join token sequences as this transformer reads them."""
        return pack(
            sequences,
            device=self.device,
            positions=self._positions,
            multiple=self.multiple_of(sum(map(len, sequences))),
            causal=self._transformer.shares_prefixes,
        )

    def multiple_of(self, tokens: int) -> int:
        """The multiple to which this number of tokens is rounded up."""
        multiple = 1
        if self.device.type == "cpu" and self._transformer.rounds_up:
            for above, larger in _CPU_MULTIPLES:
                multiple = larger if tokens > above else multiple
        return multiple

    def forward(self, packed: PackedBatch) -> Tensor:
        """`[T, hidden]`: the last hidden state of every token, in the model's dtype."""
        return self.forward_of(packed, None)[0]

    def forward_of(self, packed: PackedBatch, end: End | None) -> tuple[Tensor, PackedBatch]:
        """As `forward`, where no other token's state is read than the first or last of a sequence.

        Returns the batch that the states belong to: the same, or one of these tokens alone, if the
        last layer has computed no others.
        """
        if self.device.type == "cpu":
            set_threads(packed.tokens * self._flop_per_token, self.target.cpu_threads)
        if self._graphs is not None and packed.partly_attended is None:
            graph = self._graphs.find(packed)
            if graph is not None:
                return graph(packed), packed
        if end is None or not self._leaves_out_rows or packed.tokens < _WORTH_CHOOSING:
            return self._transformer(packed), packed
        rows, alone = packed.select_ends(end, self.multiple_of)
        return self._transformer(packed, rows), alone

    def capture_graphs_in_steps(self) -> Iterator[None]:
        """On an NVIDIA GPU, launch small batches as CUDA graphs from the end on.

        Yields wherever the device may do other work.
        """
        can_capture = self.device.type == "cuda" and self._transformer.capturable
        if self._graphs is not None or not can_capture:
            return
        tolerance = TOLERANCES[self.dtype]
        trial = GraphTrial(self._transformer, self.pack, self.max_length, tolerance)
        graphs = yield from trial.capture(tuple(make_buckets()), self.device)
        self._graphs, target = graphs, self.target
        launch = GRAPHS if graphs.forwards else PLAIN
        refused = () if graphs.proof.holds else (graphs.proof,)
        self.target = replace(
            target, paths=target.paths | {LAUNCH: launch}, refused=(*target.refused, *refused)
        )

    def exclude_unattended(self, length: int) -> None:
        """Exclude tokens that are marked as unattended, in sequences of at most `length` tokens.

        Raises `StartupError` if such a sequence is longer than the attention window.
        """
        window = self._transformer.window
        if window is not None and length > window:
            raise StartupError(
                f"queries are filled up to {length} tokens, and the model's tokens see no further "
                f"than {window}: only shorter queries are computed"
            )
        self._transformer = self._transformer.without_unattended()

    def with_fewer_layers(self) -> tuple["Backbone", float]:
        """A copy with fewer layers, and by what factor this one has more."""
        fewer = copy(self)
        fewer._transformer, times = self._transformer.with_fewer_layers()  # noqa: SLF001 - its own
        # Its last layer stands for many others.
        fewer._leaves_out_rows = False  # noqa: SLF001
        return fewer, times
