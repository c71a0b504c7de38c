"""Warms up a model, and measures its token budget by forwards of growing size.

The smallest budget within 3 % of the best throughput is chosen, unless more is promised, less fits
the memory, or MAX_BATCH_TOKENS names one. The measurement is a generator, so that a caller can do
other work between two forwards.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from smart_embedder.errors import InferenceError, StartupError
from smart_embedder.hardware.device import (
    empty_cuda_cache,
    host_memory_left,
    measure_peak_growth,
    memory_bytes,
    time_fastest_run,
)
from smart_embedder.hardware.transfer import never_finite_error
from smart_embedder.interface import Model, human_size
from smart_embedder.models.files.reading import trim_heap
from smart_embedder.models.runner import DeviceModel
from smart_embedder.requests import Outputs

# The longest forward, in seconds: new requests wait for the running one. On a GPU two forwards are
# in flight.
_LONGEST_FORWARD = 1.0
_LONGEST_OF_TWO = 0.5
_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
# Tokens of the warm-up on a CPU, which compiles nothing: enough to see that results are finite.
_FEW_TOKENS = 32
# The growth of throughput for which a larger size is tried.
_MIN_SPEEDUP = 1.03
# Below this size, throughput may stop growing only because the machine is busy for a moment.
_MIN_CONCLUSIVE_SIZE = 1024
_GPU_SHARE = 0.8
# Shares of the memory that is left on a CPU, for a forward of several texts, or of one long text.
# The rest is for requests.
_HOST_SHARE, _HOST_SHARE_OF_ONE = 1 / 3, 2 / 3
# Tokens of the forward whose memory is measured.
_MEMORY_TOKENS = 4096
_SEQUENCE_TOKENS = 256
# The range of random token ids; every vocabulary has them.
_TOKEN_IDS = (5, 100)
_ALL_KINDS = Outputs(dense=True, sparse=True, colbert=True)

_CLOSE_TO_BEST = 0.97
_SHORT_LENGTH = 512
_CPU_LEAST = 512
_GIB = 2**30
# Nothing is measured if more than this is left.
_PLENTY = 8 * _GIB
# Bytes for threads, and for modules that first requests import.
_HOST_RESERVE = 2**25
# An upper bound of a forward's bytes per token, so that measuring does not exhaust the memory.
_MAX_BYTES_PER_TOKEN = 2**17
# (GPU memory above, sequences of full length), largest first; the last row is for all smaller ones.
_LONG_TABLE = ((8 * _GIB, 12), (4 * _GIB, 6), (0, 3))
_SHORT_TABLE = ((8 * _GIB, 128), (6 * _GIB, 64), (4 * _GIB, 32), (0, 16))


@dataclass(frozen=True, slots=True)
class Measurement:
    """The size of a forward in tokens, and the seconds it took."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class MeasuredBudget:
    """The tokens that one forward may hold, the reason, and the seconds per token at that size.

    `most` is the number of tokens that fit a CPU's memory; None if there is plenty.
    """

    tokens: int
    reason: str
    seconds_per_token: float
    most: int | None = None


def probe_budget(
    model: DeviceModel[Any],
    device: torch.device,
    longest_run: float = math.inf,
    workers: int = 1,
) -> Iterator[MeasuredBudget | None]:
    """Measure forwards of growing size, and choose the token budget from them.

    Yields None between forwards, each of which takes at most `longest_run` seconds, and the budget
    last. Each of the `workers` of a CPU may run a forward at the same time.
    """
    is_cuda = device.type == "cuda"
    fits_host = None if device.type != "cpu" else measure_host_capacity(model, workers)
    most = fits_host or measure_gpu_capacity(model, device)
    minimum = minimum_tokens(model.max_length, memory_bytes(device))
    yield None
    warm_up(model, _SIZES[0] if is_cuda else _FEW_TOKENS)
    yield None
    if is_cuda:
        fewer, factor, outputs, longest = model, 1.0, _ALL_KINDS, _LONGEST_OF_TWO
    else:
        # Time is extrapolated from a few layers, because a forward on a CPU may take long. Heads
        # that read every token are left out, or their time would be multiplied, too.
        fewer, factor = model.with_fewer_layers()
        outputs, longest = Outputs(dense=True), _LONGEST_FORWARD

    def run(tokens: int) -> None:
        _run_forward(fewer, tokens, outputs)
        if is_cuda:
            torch.cuda.synchronize(device)

    # Sizes that fit the memory, from the minimum on, or from half of a conclusive one.
    least = min(minimum, _MIN_CONCLUSIVE_SIZE // 2)
    sizes = [size for size in _SIZES if size >= least and (most is None or size <= most)]
    measured = []
    for measurement in measure_forwards(
        lambda tokens: factor * time_fastest_run(partial(run, tokens)),
        sizes or [_SIZES[0]],
        min(longest, factor * longest_run),
    ):
        measured.append(measurement)
        yield None
    chosen = choose_budget(measured, minimum, most, longest if is_cuda else math.inf)
    yield replace(chosen, most=fits_host)


def measure_forwards(
    timed_forward: Callable[[int], float], sizes: list[int], longest: float = _LONGEST_FORWARD
) -> Iterator[Measurement]:
    """Measure a forward of each size.

    Stops after a conclusive size that is no faster than the one before, or before a size whose
    forward would take more than `longest` seconds.
    """
    best_rate = 0.0
    for size, next_size in zip(sizes, [*sizes[1:], 0], strict=True):
        measured = Measurement(size, timed_forward(size))
        yield measured
        no_faster = size >= _MIN_CONCLUSIVE_SIZE and measured.rate < _MIN_SPEEDUP * best_rate
        if no_faster or next_size / measured.rate > longest:
            return
        best_rate = measured.rate


def warm_up(model: Model, tokens: int) -> None:
    """Run a forward; raises `StartupError` if every result has a number that is not finite."""
    results = _run_forward(model, tokens)
    if results and all(isinstance(result, InferenceError) for result in results):
        raise never_finite_error(model.name)


def measure_gpu_capacity(model: Model, device: torch.device) -> int | None:
    """Measure how many tokens of `model` fit the free memory of a GPU; None on other devices."""
    if device.type != "cuda":
        return None
    used = 1
    # In one long text, attention may take more for each token than in many short ones.
    for length in dict.fromkeys((_SEQUENCE_TOKENS, min(_MEMORY_TOKENS, model.max_length))):
        _run_forward(model, _MEMORY_TOKENS, length=length)
        empty_cuda_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _run_forward(model, _MEMORY_TOKENS, length=length)
        used = max(used, torch.cuda.max_memory_allocated(device) - before)
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _GPU_SHARE * _MEMORY_TOKENS / used)


def measure_host_capacity(model: DeviceModel[Any], workers: int = 1) -> int | None:
    """Measure how many tokens of `model` fit a CPU's memory; None if there is plenty.

    Raises `StartupError` if one text of the maximum length does not fit, for which the system would
    kill the process.
    """
    left = (host_memory_left() - _HOST_RESERVE) // workers
    if left > _PLENTY:
        return None
    used = 1.0
    if left > 0:
        fewer, _ = model.with_fewer_layers()  # Layers reuse the memory of those before them.
        _run_forward(fewer, _FEW_TOKENS, _ALL_KINDS)
        trim_heap()  # Or the forward would reuse memory that the process already holds.
        tokens = max(_FEW_TOKENS, min(_MEMORY_TOKENS, left // _MAX_BYTES_PER_TOKEN))
        # Short sequences: models whose attention needs memory per pair of tokens refuse long ones.
        growth = measure_peak_growth(partial(_run_forward, fewer, tokens, _ALL_KINDS))
        if growth is None:
            return None
        used = max(used, growth / tokens)
    missing = int(used * model.max_length / _HOST_SHARE_OF_ONE - left)
    if missing > 0:
        raise StartupError(
            f"{model.name} does not fit the memory: {human_size(max(0, left))} are left for "
            f"forwards and requests, and a text of {model.max_length} tokens needs at least "
            f"{human_size(missing)} more: raise the memory limit of the machine or container, or "
            "lower the maximum length of a text (BGE_EMBED_MAX_LENGTH and similar settings)"
        )
    return int(left * _HOST_SHARE / used)


def _run_forward(
    model: Model, tokens: int, outputs: Outputs = _ALL_KINDS, *, length: int = _SEQUENCE_TOKENS
) -> Sequence[object]:
    """Run about `tokens` tokens in sequences of at most `length`, and return their results."""
    length = min(length, tokens, model.max_length)
    # Random, because a causal model computes common prefixes only once.
    ids = np.random.default_rng(0).integers(*_TOKEN_IDS, (tokens // length, length))
    # Some classifiers read the state of the token that ends a text.
    for place, token in enumerate(model.special_tokens[1][-length:][::-1], 1):
        ids[:, -place] = token.id
    return model.launch(list(ids), [outputs] * len(ids))()


def minimum_tokens(length: int, memory_bytes: int | None) -> int:
    """Return the least budget for texts of `length` tokens; without `memory_bytes`, on a CPU.

    On a CPU a long text runs alone, whatever the budget is. The minimum there keeps a busy moment
    at the start from choosing batches that are too small for its matrix units.
    """
    table = _SHORT_TABLE if length <= _SHORT_LENGTH else _LONG_TABLE
    if memory_bytes is None:
        return max(_CPU_LEAST, table[-1][1] * length if length <= _SHORT_LENGTH else 0)
    sequences = next(count for above, count in table if memory_bytes > above)
    return sequences * length


def choose_budget(
    measured: Sequence[Measurement],
    minimum: int,
    most: int | None = None,
    longest: float = math.inf,
) -> MeasuredBudget:
    """Choose the budget from forwards of growing size; at most `most` tokens fit the memory.

    It is raised to the `minimum` as far as a forward takes no more than `longest` seconds.
    """
    best = max(measured, key=lambda measurement: measurement.rate)
    close = next(
        measurement for measurement in measured if measurement.rate >= _CLOSE_TO_BEST * best.rate
    )
    tokens = close.tokens
    reason = f"the smallest within 3 % of the best, {best.rate:.0f} tokens/s at {best.tokens}"
    in_time = int(min(minimum, longest * close.rate))
    if tokens < in_time:
        tokens, reason = in_time, "the minimum promised for this length and memory"
        if in_time < minimum:
            reason = f"a forward takes {longest:g} seconds; more is promised for this memory"
    return cap_budget(MeasuredBudget(tokens, reason, seconds_per_token=1 / close.rate), most)


def cap_budget(budget: MeasuredBudget, most: int | None) -> MeasuredBudget:
    """Lower the budget to the `most` tokens that fit the memory."""
    if most is None or budget.tokens <= most:
        return budget
    return replace(budget, tokens=max(1, most), reason="limited by the memory")


def apply_budget_setting(budget: MeasuredBudget, setting: int | Literal["auto"]) -> MeasuredBudget:
    """Replace the budget by that of MAX_BATCH_TOKENS, as far as it fits the memory."""
    if setting == "auto":
        return budget
    return cap_budget(replace(budget, tokens=setting, reason="MAX_BATCH_TOKENS"), budget.most)
