"""The token budget of a model: it is warmed up, and measured by forwards of growing size.

The smallest budget that is about as fast as any is chosen, unless more is promised, less fits the
memory, or a setting names one. Who waits while a model is measured is not known here: whoever
measures beside other work takes a step at a time.
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

# The longest forward in seconds, because new requests wait for the one that runs; it also keeps the
# probe short. On a GPU two forwards are in flight.
_LONGEST_FORWARD = 1.0
_LONGEST_OF_TWO = 0.5
_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
# Enough on a CPU, which compiles nothing, to see that the results are finite.
_FEW = 32
_WORTH_GOING_ON = 1.03
# Below this size a busy moment may look like the limit of the throughput.
_WEIGHTY_SIZE = 1024
_MEMORY_SHARE = 0.8
# Of the memory that is left on a CPU: for a forward of several texts, or of one long text. The rest
# is for requests.
_HOST_SHARE, _HOST_SHARE_OF_ONE = 1 / 3, 2 / 3
_MEMORY_TOKENS = 4096
_SEQUENCE_TOKENS = 256
# Ids that every vocabulary has.
_TOKENS = (5, 100)
_ALL_KINDS = Outputs(dense=True, sparse=True, colbert=True)

_CLOSE_TO_BEST = 0.97
_SHORT_LENGTH = 512
_CPU_LEAST = 512
_GIB = 2**30
# With more than this left nothing has to be measured.
_PLENTY = 8 * _GIB
# What the process takes beside forwards and requests: threads, and modules of first requests.
_HOST_RESERVE = 2**25
# Bytes that a forward may take for each token, so that measuring it does not end the process.
_MOST_OF_A_TOKEN = 2**17
# (GPU memory above, sequences of full length), largest first; the last is for what has less.
_LONG_TABLE = ((8 * _GIB, 12), (4 * _GIB, 6), (0, 3))
_SHORT_TABLE = ((8 * _GIB, 128), (6 * _GIB, 64), (4 * _GIB, 32), (0, 16))


@dataclass(frozen=True, slots=True)
class Measurement:
    """A forward of `tokens` took `seconds`."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens in a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class ChosenBudget:
    """How many tokens one forward may hold, why, and the seconds that a token takes then.

    `most` is how many the memory holds, where more would end the process.
    """

    tokens: int
    reason: str
    seconds_per_token: float
    most: int | None = None


def probe(
    model: DeviceModel[Any],
    device: torch.device,
    longest_run: float = math.inf,
    workers: int = 1,
) -> Iterator[ChosenBudget | None]:
    """Measure forwards of growing size and choose the token budget from them.

    Yields None between runs, none of which takes more than `longest_run` seconds. Each of the
    `workers` of a CPU may run a forward at the same time.
    """
    is_cuda = device.type == "cuda"
    fits_host = None if device.type != "cpu" else tokens_that_fit_host(model, workers)
    most = fits_host or tokens_that_fit(model, device)
    minimum = minimum_tokens(model.max_length, memory_bytes(device))
    yield None
    warm_up(model, _SIZES[0] if is_cuda else _FEW)
    yield None
    if is_cuda:
        few, times, outputs, longest = model, 1.0, _ALL_KINDS, _LONGEST_OF_TWO
    else:
        # Extrapolated from a few layers, because a forward on a CPU may take long. The heads for
        # every token are left out: extrapolated, their share would be too large.
        few, times = model.with_fewer_layers()
        outputs, longest = Outputs(dense=True), _LONGEST_FORWARD

    def run(tokens: int) -> None:
        _forward(few, tokens, outputs)
        if is_cuda:
            torch.cuda.synchronize(device)

    # Those that fit the memory, from one below the minimum on.
    least = min(minimum, _WEIGHTY_SIZE // 2)
    sizes = [size for size in _SIZES if size >= least and (most is None or size <= most)]
    measured = []
    for each in measure(
        lambda tokens: times * time_fastest_run(partial(run, tokens)),
        sizes or [_SIZES[0]],
        min(longest, times * longest_run),
    ):
        measured.append(each)
        yield None
    chosen = choose_budget(measured, minimum, most, longest if is_cuda else math.inf)
    yield replace(chosen, most=fits_host)


def measure(
    timed_forward: Callable[[int], float], sizes: list[int], longest: float = _LONGEST_FORWARD
) -> Iterator[Measurement]:
    """Measure a forward of each size.

    Ends when a large size is no faster than the one before, or before a size whose forward would
    take more than `longest` seconds.
    """
    best_rate = 0.0
    for size, next_size in zip(sizes, [*sizes[1:], 0], strict=True):
        measured = Measurement(size, timed_forward(size))
        yield measured
        no_faster = size >= _WEIGHTY_SIZE and measured.rate < _WORTH_GOING_ON * best_rate
        if no_faster or next_size / measured.rate > longest:
            return
        best_rate = measured.rate


def warm_up(model: Model, tokens: int) -> None:
    """Run a forward; raises `StartupError` where no sequence has a result of finite numbers."""
    results = _forward(model, tokens)
    if results and all(isinstance(each, InferenceError) for each in results):
        raise never_finite_error(model.name)


def tokens_that_fit(model: Model, device: torch.device) -> int | None:
    """How many tokens of `model` the free memory of a GPU holds; None on other devices."""
    if device.type != "cuda":
        return None
    used = 1
    # In one long text, attention may take more for each token than in many short ones.
    for length in dict.fromkeys((_SEQUENCE_TOKENS, min(_MEMORY_TOKENS, model.max_length))):
        _forward(model, _MEMORY_TOKENS, length=length)
        empty_cuda_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _forward(model, _MEMORY_TOKENS, length=length)
        used = max(used, torch.cuda.max_memory_allocated(device) - before)
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _MEMORY_SHARE * _MEMORY_TOKENS / used)


def tokens_that_fit_host(model: DeviceModel[Any], workers: int = 1) -> int | None:
    """How many tokens of `model` the memory that a CPU has left holds; None for more than enough.

    Raises `StartupError` where one text of the maximum length does not fit: the system would kill
    the process.
    """
    left = (host_memory_left() - _HOST_RESERVE) // workers
    if left > _PLENTY:
        return None
    used = 1.0
    if left > 0:
        few, _ = model.with_fewer_layers()  # The layers use the same memory one after the other.
        _forward(few, _FEW, _ALL_KINDS)
        trim_heap()  # Or the forward would use what the process has already.
        tokens = max(_FEW, min(_MEMORY_TOKENS, left // _MOST_OF_A_TOKEN))
        # In short sequences: families whose attention grows with pairs of tokens refuse long texts.
        growth = measure_peak_growth(partial(_forward, few, tokens, _ALL_KINDS))
        if growth is None:
            return None
        used = max(used, growth / tokens)
    missing = int(used * model.max_length / _HOST_SHARE_OF_ONE - left)
    if missing > 0:
        raise StartupError(
            f"{model.name} does not fit the memory: {human_size(max(0, left))} are left for "
            f"forwards and requests, and with a text of {model.max_length} tokens at least "
            f"{human_size(missing)} more are needed: raise the memory limit of the machine or "
            "container, or lower the most tokens of a text (BGE_EMBED_MAX_LENGTH and its like)"
        )
    return int(left * _HOST_SHARE / used)


def _forward(
    model: Model, tokens: int, outputs: Outputs = _ALL_KINDS, *, length: int = _SEQUENCE_TOKENS
) -> Sequence[object]:
    """Run about `tokens` tokens in sequences of at most `length`, and return their results."""
    length = min(length, tokens, model.max_length)
    # Random, because a causal model computes common prefixes only once.
    drawn = np.random.default_rng(0).integers(*_TOKENS, (tokens // length, length))
    return model.launch(list(drawn), [outputs] * len(drawn))()


def minimum_tokens(length: int, memory_bytes: int | None) -> int:
    """The least budget for texts of `length` tokens on a GPU with such a memory; None is a CPU.

    On a CPU a long text goes alone, whatever the budget is; what counts there is that a busy moment
    at the start must not leave it with batches too small for its matrix units for good.
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
) -> ChosenBudget:
    """The budget from forwards of growing size; `most` is what the memory holds, where known.

    It is raised to the `minimum` as far as a forward takes no more than `longest` seconds.
    """
    best = max(measured, key=lambda one: one.rate)
    close = next(one for one in measured if one.rate >= _CLOSE_TO_BEST * best.rate)
    tokens = close.tokens
    reason = f"the smallest within 3 % of the best, {best.rate:.0f} tokens/s at {best.tokens}"
    in_time = int(min(minimum, longest * close.rate))
    if tokens < in_time:
        tokens, reason = in_time, "the least that is promised for this length and memory"
        if in_time < minimum:
            reason = f"what takes {longest:g} seconds, less than is promised for this memory"
    return capped(ChosenBudget(tokens, reason, seconds_per_token=1 / close.rate), most)


def capped(budget: ChosenBudget, most: int | None) -> ChosenBudget:
    """The budget, lowered to `most` tokens, which the memory holds."""
    if most is None or budget.tokens <= most:
        return budget
    return replace(budget, tokens=max(1, most), reason="what fits the memory")


def named_or_chosen(budget: ChosenBudget, named: int | Literal["auto"]) -> ChosenBudget:
    """The budget that was chosen, or the one of MAX_BATCH_TOKENS if the memory holds it."""
    if named == "auto":
        return budget
    return capped(replace(budget, tokens=named, reason="MAX_BATCH_TOKENS"), budget.most)
