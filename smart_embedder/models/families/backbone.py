"""The interface of all families of transformers.

A `Backbone` is a transformer on its `Target`. It maps a packed batch to the hidden state of every
token. Families derive from `Transformer`; `smart_embedder.models.heads` turn states into vectors.
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

# One in this many layers is run to measure the cost of all.
_DEPTH_RATIO = 12
# The rows for each thread that `run_in_row_blocks` computes at once.
_ROWS_PER_THREAD = 256
# The most scores of one call of attention on a CPU: those of one head for a text of 8,192 tokens,
# which take 50 ms on two cores.
_MAX_SCORES_PER_CALL = 2**26
# (tokens, multiple): batches of more tokens are rounded up to the multiple. oneDNN compiles a
# kernel for each number of rows, which takes milliseconds in bfloat16; rounded numbers reuse
# kernels. Added rows cost relatively more in a small batch.
_CPU_MULTIPLES = ((32, 8), (512, 32))
# In batches of fewer tokens the last layer computes all: selecting those that are read would take
# as long.
_MIN_TOKENS_TO_SELECT = 256
# Operations that a library may compute in another order for another number of rows.
_BATCH_DEPENDENT = ("linear", "add_linear", "int8_gemm", ATTENTION)


class Transformer(ABC):
    """Maps a packed batch to the hidden state of every token.

    `shares_prefixes`: whether common prefixes are computed once. `capturable`: whether a forward
    can be captured as a CUDA graph. `rounds_up`: whether a forward accepts rows that belong to no
    sequence. `window`: the attention window of some layers, or None.
    """

    shares_prefixes: ClassVar[bool] = False
    capturable = True
    rounds_up = True
    window: int | None = None

    @abstractmethod
    def __call__(self, packed: PackedBatch, rows: Tensor | None = None) -> Tensor:
        """Return the last hidden states, `[T, hidden]`, or those of `rows`, `[R, hidden]`."""

    @abstractmethod
    def without_unattended(self) -> Self:
        """Return a copy whose attention excludes tokens that are marked as unattended."""

    def with_fewer_layers(self) -> tuple[Self, float]:
        """Return a copy with fewer layers, and the factor by which this one has more."""
        return self, 1.0


@dataclass(frozen=True, slots=True)
class LayeredTransformer(Transformer):
    """A transformer of layers that are called in order, with states, batch and attention."""

    layers: Sequence[Callable[..., Tensor]]
    attend: Attention

    def without_unattended(self) -> Self:
        """Implement `Transformer`."""
        return replace(self, attend=exclude_unattended(self.attend))

    def with_fewer_layers(self) -> tuple[Self, float]:
        """Implement `Transformer`; keeps enough layers to measure the cost of all."""
        few: Any = self.layers[: max(2, len(self.layers) // _DEPTH_RATIO)]
        return replace(self, layers=few), len(self.layers) / len(few)


_rows_undivided = ContextVar("rows_undivided", default=False)


@contextmanager
def rows_undivided() -> Iterator[None]:
    """Let `run_in_row_blocks` compute all rows at once within the context."""
    token = _rows_undivided.set(True)
    try:
        yield
    finally:
        _rows_undivided.reset(token)


def fits_one_call(tokens: int, scores: int) -> bool:
    """Whether a CPU computes attention and the products around it in one call.

    `scores` is the number of scores of all heads. `run_in_row_blocks` and `attend_by_heads` divide
    larger batches.
    """
    return tokens <= _ROWS_PER_THREAD * torch.get_num_threads() and scores <= _MAX_SCORES_PER_CALL


def run_in_row_blocks(step: Callable[..., Tensor], states: Tensor, *others: Tensor) -> Tensor:
    """Run `step`, which computes each row by itself, on a few rows at a time on a CPU.

    The intermediate results then fit the cache, and a short forward can run between two blocks.
    """
    num_rows = _ROWS_PER_THREAD * torch.get_num_threads()
    if states.device.type != "cpu" or len(states) <= num_rows or _rows_undivided.get():
        return step(states, *others)

    def results() -> Iterator[Tensor]:
        blocks = (torch.split(tensor, num_rows) for tensor in (states, *others))
        for block in zip(*blocks, strict=True):
            preemption_point()
            yield step(*block)

    return cat_in_large_pages(results(), len(states))


def attend_by_heads(
    attend: Callable[[QueryKeyValue], Tensor], states: QueryKeyValue, packed: PackedBatch
) -> Tensor:
    """Call `attend`; if sequences are long on a CPU, for a few heads at a time.

    A short forward can then run between two calls.
    """
    query, key, value = states
    if query.device.type != "cpu" or len(query) * packed.pairs <= _MAX_SCORES_PER_CALL:
        preemption_point()
        return attend(states)
    group = len(query) // len(key)
    num_keys = max(1, _MAX_SCORES_PER_CALL // (group * packed.pairs))

    def results() -> Iterator[Tensor]:
        for start in range(0, len(key), num_keys):
            preemption_point()
            keys = slice(start, start + num_keys)
            queries = slice(group * keys.start, group * keys.stop)
            yield attend((query[queries], key[keys], value[keys]))

    return cat_in_large_pages(results(), len(query), dim=1)


def preemption_point() -> None:
    """Run a short forward that waits for this thread, if there is one.

    Restores the number of threads, which that forward may have changed.
    """
    threads = torch.get_num_threads()
    if run_preempting_call():
        torch.set_num_threads(threads)


class Backbone:
    """A transformer that maps a packed batch to the hidden state of every token.

    `max_length` is the number of positions, and `positions` says how they are counted. `parameters`
    is the number of weights that each token is multiplied with. `configuration` holds everything
    besides weights that the states depend on. With `reproducible`, the kernels in C compute the
    same states for a text, to the last bit, in any batch. `encode_images` computes the vectors of
    pictures from the arrays of an image processor, and the tokens of each, if the model reads them;
    where a picture is part of a message, the states of the packed message.
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
        encode_images: Any = None,
    ) -> None:
        self.target = target
        self.encode_images = encode_images
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
        """Whether a text's states are the same to the last bit, whatever else is in the batch."""
        paths = self.target.paths
        return self._reproducible and all(
            paths.get(name, NATIVE) == NATIVE for name in _BATCH_DEPENDENT
        )

    def place_head(self, head: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """Move a head to the device, by default in the model's dtype.

        If the backbone is `reproducible`, the head's linear layers become so, too. If the kernels
        cannot compute them, the backbone is not `reproducible` any more.
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
        """The dtype in which vectors are copied to the host; as exact as the model's."""
        half = self.device.type == "cuda" and self.dtype is not torch.float32
        return torch.float16 if half else torch.float32

    def pack(self, sequences: list[TokenIds]) -> PackedBatch:
        """Pack token sequences as this transformer reads them."""
        return pack(
            sequences,
            device=self.device,
            positions=self._positions,
            multiple=self.multiple_of(sum(map(len, sequences))),
            causal=self._transformer.shares_prefixes,
        )

    def multiple_of(self, tokens: int) -> int:
        """Return the multiple to which this number of tokens is rounded up."""
        multiple = 1
        if self.device.type == "cpu" and self._transformer.rounds_up:
            for above, larger in _CPU_MULTIPLES:
                multiple = larger if tokens > above else multiple
        return multiple

    def forward(self, packed: PackedBatch) -> Tensor:
        """Return the last hidden state of every token, `[T, hidden]`, in the model's dtype."""
        return self.forward_of(packed, None)[0]

    def forward_of(self, packed: PackedBatch, end: End | None) -> tuple[Tensor, PackedBatch]:
        """Run a forward of which only the `end` of each sequence is read; None reads every token.

        Returns the states and the batch that they belong to: `packed`, or, if the last layer
        computed only these tokens, a batch of one token for each sequence.
        """
        self.set_threads(packed.tokens)
        if self._graphs is not None and packed.partly_attended is None:
            graph = self._graphs.find(packed)
            if graph is not None:
                return graph(packed), packed
        if end is None or not self._leaves_out_rows or packed.tokens < _MIN_TOKENS_TO_SELECT:
            return self._transformer(packed), packed
        rows, alone = packed.select_ends(end, self.multiple_of)
        return self._transformer(packed, rows), alone

    def set_threads(self, tokens: int) -> None:
        """Set PyTorch's number of threads for a forward of `tokens` tokens on a CPU."""
        if self.device.type == "cpu":
            set_threads(tokens * self._flop_per_token, self.target.cpu_threads)

    def capture_graphs_in_steps(self) -> Iterator[None]:
        """Capture CUDA graphs of small batches on an NVIDIA GPU; later forwards launch them.

        Yields whenever the device may do other work.
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
        """Let no token attend to tokens that are marked as unattended.

        Sequences with such tokens have at most `length` tokens. Raises `StartupError` if that is
        more than the attention window.
        """
        window = self._transformer.window
        if window is not None and length > window:
            raise StartupError(
                f"queries are padded to {length} tokens, which is more than the model's attention "
                f"window of {window} tokens: such queries cannot be computed"
            )
        self._transformer = self._transformer.without_unattended()

    def with_fewer_layers(self) -> tuple["Backbone", float]:
        """Return a copy with fewer layers, and the factor by which this one has more."""
        fewer = copy(self)
        fewer._transformer, factor = self._transformer.with_fewer_layers()  # noqa: SLF001 - a copy
        # The copy's last layer stands for many others, so it computes all rows.
        fewer._leaves_out_rows = False  # noqa: SLF001
        return fewer, factor
