"""The backbone of a model: a transformer from packed token ids to hidden states."""

from collections.abc import Iterator, Sequence
from copy import copy

import torch

from app.engine.types import TokenIds
from app.errors import StartupError
from app.models.architectures.transformer import Transformer
from app.models.attention.partly_attended import excluding_unattended
from app.models.batch.packing import PackedBatch, pack
from app.models.batch.position_ids import PositionScheme
from app.models.batch.selection import TokenSelection, select_tokens
from app.models.cuda_graphs import GraphedForwards, GraphTrial, make_buckets
from app.models.device.cpu_threads import CpuThreads
from app.models.ops.proof import TOLERANCES
from app.models.target import Target

# oneDNN compiles a kernel for each number of rows, which takes milliseconds in bfloat16. Rounding
# up makes the numbers few, so that kernels are reused; added rows cost more the fewer rows there
# are. (Tokens up to, multiple.)
_CPU_MULTIPLES = ((32, 1), (512, 8))
CPU_LARGE_MULTIPLE = 32


class Backbone:
    """A transformer that maps a packed batch to the hidden state of every token.

    `max_length` is the number of positions, and `positions` says how tokens are numbered.
    `parameters` is the number of weights that each token is multiplied with.
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
    ) -> None:
        self.target = target
        self.device = target.device
        self.dtype = target.dtype
        self.backend = target.backend
        self.hidden_size = hidden_size
        self.max_length = max_length
        self._transformer = transformer
        self._positions = positions
        self._graphs: GraphedForwards | None = None
        self._cpu_threads = CpuThreads(parameters, target.cpu_threads)

    @property
    def reads_segments(self) -> bool:
        """Whether the tokens of the second text of a pair must be marked."""
        return self._positions.segment_offset > 0

    @property
    def shares_prefixes(self) -> bool:
        """Whether common prefixes of sequences are computed once, as a causal model allows."""
        return self._transformer.shares_prefixes

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
            multiple=self._multiple(sum(map(len, sequences))),
            causal=self.shares_prefixes,
        )

    def _multiple(self, tokens: int) -> int:
        """The multiple to which this number of tokens is rounded up."""
        rounds_up = self.device.type == "cpu" and self._transformer.rounds_up
        return cpu_multiple(tokens) if rounds_up else 1

    def forward(self, packed: PackedBatch) -> torch.Tensor:
        """`[T, hidden]`: the last hidden state of every token, in the model's dtype."""
        if self.device.type == "cpu":
            self._cpu_threads.set_for(packed.tokens)
        graphs = self._graphs if packed.partly_attended is None else None
        graph = None if graphs is None else graphs.find(packed)
        return self._transformer(packed) if graph is None else graph(packed)

    def capture_graphs_in_steps(self) -> Iterator[None]:
        """On an NVIDIA GPU, launch small batches as CUDA graphs from the end on.

        Yields wherever the device may do other work.
        """
        if self.device.type == "cuda" and self._transformer.capturable:
            tolerance = TOLERANCES[self.dtype]
            trial = GraphTrial(self._transformer, self.pack, self.max_length, tolerance)
            self._graphs = yield from trial.capture(tuple(make_buckets()), self.device)
            self.target = self.target.launched_by(self._graphs)

    def select_tokens(self, packed: PackedBatch, selected: Sequence[bool]) -> TokenSelection:
        """The tokens of the selected sequences, their number rounded up as for a forward."""
        return select_tokens(packed, selected, self._multiple)

    def leave_out_unattended(self, length: int) -> None:
        """Exclude tokens that are marked as unattended, in sequences of at most `length` tokens.

        Raises `StartupError` if such a sequence is longer than the attention window.
        """
        window = self._transformer.window
        if window is not None and length > window:
            raise StartupError(
                f"queries are filled up to {length} tokens, and the model's tokens see no further "
                f"than {window}: only shorter queries are computed"
            )
        self._transformer = self._transformer.with_attention(excluding_unattended)

    def with_fewer_layers(self) -> tuple["Backbone", float]:
        """A copy with fewer layers, and by what factor this one has more."""
        fewer = copy(self)
        fewer._transformer, times = self._transformer.with_fewer_layers()  # noqa: SLF001 - its own
        return fewer, times


def cpu_multiple(tokens: int) -> int:
    """The multiple to which the rows of a forward of `tokens` are rounded up on a CPU."""
    return next((by for most, by in _CPU_MULTIPLES if tokens <= most), CPU_LARGE_MULTIPLE)
