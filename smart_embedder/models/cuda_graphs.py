"""Runs small batches as CUDA graphs: hundreds of launches are captured once, and repeated as one.

A graph always computes the bucket that it was captured for: a number of tokens in a number of
sequences. A smaller batch is copied to the memory that the graph reads, and its states from the
memory that it writes; the rest of the bucket belongs to no sequence. All copies run in one stream,
so several batches may be in flight.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smart_embedder.hardware.device import capture_lock, time_fastest_run
from smart_embedder.kernels.packed_batch import (
    CALL_COST,
    QUERIES_PER_BLOCK,
    LengthClass,
    PackedBatch,
)
from smart_embedder.kernels.proof import try_path
from smart_embedder.kernels.target import Proof, log_refused_paths
from smart_embedder.tokens import TokenIds

# Close enough that padding a batch to its bucket costs at most half of the batch, or is hidden
# behind the time to read the weights. Above the last, every GPU computes longer than the launches.
_TOKENS = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
_TOKENS_OF_A_SEQUENCE = 8
# The tolerance of a whole forward, as a multiple of one operation's: rounding errors are random.
_LAYERS = 4
# The range of random token ids; every vocabulary has them.
_RANDOM_IDS = (5, 100)

LAUNCH, GRAPHS, PLAIN = "launch", "graphs", "eager"

Forward = Callable[[PackedBatch], Tensor]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The size of a graph: its tokens, sequences, and tokens of the longest sequence."""

    tokens: int
    sequences: int
    longest: int

    def holds(self, packed: PackedBatch) -> bool:
        """Return whether the batch fits the bucket."""
        return (
            packed.tokens <= self.tokens
            and len(packed.lengths) <= self.sequences
            and packed.max_length <= self.longest
        )


def make_buckets() -> Iterator[Bucket]:
    """Yield, for each number of tokens, a bucket for few long sequences and one for many short.

    Attention starts as many blocks for each sequence as for the longest of the bucket.
    """
    for tokens in _TOKENS:
        most = max(1, tokens // _TOKENS_OF_A_SEQUENCE)
        previous = -1
        for longest in (tokens, min(tokens, QUERIES_PER_BLOCK)):
            sequences = min(most, CALL_COST * QUERIES_PER_BLOCK // longest)
            if sequences > previous:
                yield Bucket(tokens, sequences, longest)
            previous = sequences


@dataclass(frozen=True)
class _StaticBatch(PackedBatch):
    """The memory that a graph reads; the lengths of its sequences are only on the device."""

    longest: int = 0

    @property
    def lengths(self) -> list[int]:
        raise NotImplementedError("this attention asks for lengths that a CUDA graph does not know")

    @cached_property
    def length_classes(self) -> list[LengthClass]:
        return [LengthClass(0, self.tokens, self.longest, self.cu_seqlens)]


class GraphedForward:
    """A forward captured for a bucket; raises PyTorch's errors if the capture fails.

    The graph allocates in `pool`, which graphs on the device share: none needs its contents before
    it begins or after it ends.
    """

    def __init__(
        self, forward: Forward, bucket: Bucket, stream: torch.cuda.Stream, pool: Any
    ) -> None:
        self.bucket = bucket
        device = stream.device
        self._batch = _StaticBatch(
            input_ids=torch.zeros(1, bucket.tokens, dtype=torch.int64, device=device),
            position_ids=torch.zeros(1, bucket.tokens, dtype=torch.int64, device=device),
            cu_seqlens=torch.zeros(bucket.sequences + 1, dtype=torch.int32, device=device),
            offsets=np.array([0, bucket.tokens]),
            unpack_order=np.zeros(1, np.intp),
            longest=bucket.longest,
        )
        self._graph = torch.cuda.CUDAGraph()
        # A stream of its own, because an error in a capture makes the stream unusable.
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                # In a first call libraries allocate the memory that they keep.
                forward(self._batch)
                with capture_lock:
                    self._states = self._capture(forward, stream, pool)
        finally:
            current.wait_stream(stream)

    def _capture(self, forward: Forward, stream: torch.cuda.Stream, pool: Any) -> Tensor:
        try:
            # Thread-local, because other threads wait for results meanwhile.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                return forward(self._batch)
            finally:
                self._graph.capture_end()
        except RuntimeError:
            # CUDA may have ended the capture by itself. PyTorch's allocator must be notified, or it
            # would never again reuse memory that two streams have used, such as results.
            device = stream.device.index
            with suppress(RuntimeError):  # It knows already.
                torch._C._cuda_endAllocateToPool(device, pool)  # noqa: SLF001 - the only way
                torch._C._cuda_releasePool(device, pool)  # noqa: SLF001
            raise

    def __call__(self, packed: PackedBatch) -> Tensor:
        """Compute the states `[T, hidden]` of a batch that fits the bucket."""
        batch, tokens, bounds = self._batch, packed.tokens, len(packed.offsets)
        batch.input_ids[:, :tokens].copy_(packed.input_ids)
        batch.position_ids[:, :tokens].copy_(packed.position_ids)
        batch.cu_seqlens[:bounds].copy_(packed.cu_seqlens)
        # The unused sequences of the bucket are empty.
        batch.cu_seqlens[bounds:].fill_(tokens)
        self._graph.replay()
        # A copy, because the next batch may be computed before these states are read.
        return self._states[:tokens].clone()


@dataclass(frozen=True, slots=True)
class GraphedForwards:
    """Graphs in ascending order of size; empty if the `proof` of one failed."""

    forwards: tuple[GraphedForward, ...]
    proof: Proof

    def find(self, packed: PackedBatch) -> GraphedForward | None:
        """Return the smallest graph that the batch fits, if there is one."""
        return next((graph for graph in self.forwards if graph.bucket.holds(packed)), None)


@dataclass(frozen=True, slots=True)
class GraphTrial:
    """Captures graphs of a forward, and compares their states with those of the plain forward.

    `tolerance` is that of one operation.
    """

    forward: Forward
    pack: Callable[[list[TokenIds]], PackedBatch]
    max_length: int
    tolerance: float

    @torch.inference_mode()
    def capture(
        self, buckets: Sequence[Bucket], device: torch.device
    ) -> Generator[None, None, GraphedForwards]:
        """Return the graphs of buckets whose smallest batch they make faster.

        Yields wherever the device may do other work.
        """
        stream, pool = _capture_stream(device), torch.cuda.graph_pool_handle()
        captured: list[GraphedForward] = []
        faster: list[GraphedForward] = []
        # The largest first, whose memory the others share. All are kept until the last is captured.
        for bucket in reversed(buckets):
            sizes = (smaller.tokens for smaller in buckets if smaller.tokens < bucket.tokens)
            smallest = self._draw_batch(bucket, 1 + max(sizes, default=0), bucket.longest // 3)
            batches = self._draw_batch(bucket, bucket.tokens, bucket.longest), smallest
            make = partial(GraphedForward, self.forward, bucket, stream, pool)
            proof = self._prove(make, batches, captured)
            yield
            if not proof.holds:
                log_refused_paths([proof], PLAIN)
                return GraphedForwards((), proof)
            graphed = _time_forward(captured[-1], smallest)
            yield
            if graphed < _time_forward(self.forward, smallest):
                faster.append(captured[-1])
            yield
        return GraphedForwards(tuple(reversed(faster)), proof)

    def _draw_batch(self, bucket: Bucket, tokens: int, longest: int) -> PackedBatch:
        """Draw a random batch of `tokens`, or of as many as the bucket holds."""
        longest = min(longest, self.max_length)
        count = min(tokens, longest * bucket.sequences)
        ids = np.random.default_rng(0).integers(*_RANDOM_IDS, count)
        return self.pack(np.split(ids, range(longest, count, longest)))

    def _prove(
        self,
        make: Callable[[], GraphedForward],
        batches: Sequence[PackedBatch],
        captured: list[GraphedForward],
    ) -> Proof:
        """Capture a graph, and compare its states of the batches, token by token."""
        states = [self.forward(batch).float() for batch in batches]
        scales = [state.abs().amax(dim=1, keepdim=True) for state in states]

        def compute() -> list[Tensor]:
            captured.append(make())
            graph = captured[-1]
            return [graph(batch) / scale for batch, scale in zip(batches, scales, strict=True)]

        expected = [state / scale for state, scale in zip(states, scales, strict=True)]
        return try_path(LAUNCH, GRAPHS, compute, expected, _LAYERS * self.tolerance)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all models, because cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _time_forward(forward: Forward, packed: PackedBatch) -> float:
    def run() -> None:
        forward(packed)
        torch.cuda.synchronize(packed.device)

    return time_fastest_run(run)
