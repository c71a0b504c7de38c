"""The token budget: how forwards are measured, and how the budget is chosen."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from smart_embedder.errors import StartupError
from smart_embedder.hardware.transfer import not_finite_error
from smart_embedder.kernels.packed_batch import find_shared_prefixes
from smart_embedder.models import warmup as module
from smart_embedder.models.warmup import (
    MeasuredBudget,
    Measurement,
    apply_budget_setting,
    cap_budget,
    choose_budget,
    measure_forwards,
    measure_gpu_capacity,
    measure_host_capacity,
    minimum_tokens,
    probe_budget,
    warm_up,
)
from smart_embedder.tokens import SpecialToken

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
MEASURED = [
    Measurement(256, 0.256 / 0.6),
    Measurement(512, 0.512 / 0.96),
    Measurement(1024, 1.024 / 0.98),
    Measurement(2048, 2.048),
]


@pytest.mark.parametrize(
    ("seconds", "longest", "sizes"),
    [
        # Stops before a size whose forward would take too long, but always measures the first.
        ({128: 0.128, 256: 0.256, 512: 0.512, 1024: 1.024}, 1.0, [128, 256, 512]),
        ({512: 51.2, 1024: 102.4}, 1.0, [512]),
        # Stops if a larger batch is no faster, but not at a small size, for a busy moment.
        ({512: 1.0, 1024: 1.5, 2048: 2.95, 4096: 5.0}, 100, [512, 1024, 2048]),
        ({128: 1.0, 256: 9.0, 512: 2.0, 1024: 3.0, 2048: 6.5}, 100, [128, 256, 512, 1024, 2048]),
    ],
)
def test_token_budget_sizes_are_measured_while_they_are_fast_and_faster(
    seconds, longest, sizes
) -> None:
    found = list(measure_forwards(seconds.__getitem__, list(seconds), longest))
    assert found == [Measurement(size, seconds[size]) for size in sizes]


class Recorder:
    """A model that records its sequences."""

    name = "damaged"
    special_tokens = ([], [SpecialToken(2, "</s>")])

    def __init__(self, max_length: int, results: list[object] | None = None) -> None:
        self.max_length = max_length
        self.sequences: list[np.ndarray] = []
        self._results = results or []

    def launch(self, sequences, outputs):
        self.sequences = sequences
        return lambda: self._results[: len(sequences)]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    def with_fewer_layers(self):
        return self, 12.0


def test_token_budget_probe_runs_no_forward_longer_than_allowed(monkeypatch) -> None:
    model, seen = Recorder(8192), []

    def a_second(run) -> float:
        run()
        seen.append(model.tokens)
        return 1.0

    monkeypatch.setattr(module, "time_fastest_run", a_second)
    *steps, budget = probe_budget(model, CPU, longest_run=0.5)
    assert set(steps) == {None}
    # The first size shows that all others would take longer.
    assert (seen, budget.tokens, budget.seconds_per_token) == ([512], 512, 12 / 512)


@pytest.mark.parametrize("longest", [16, 8192])
@pytest.mark.parametrize("failed", [16, 15, 0])
def test_warm_up_shares_no_prefix_and_refuses_results_that_are_not_finite(
    longest: int, failed: int
) -> None:
    """A causal model would compute a shared prefix once, and seem faster than it is."""
    model = Recorder(longest, [not_finite_error()] * failed + [1.0] * (16 - failed))
    if failed < 16:
        warm_up(model, 4096)
    else:
        with pytest.raises(StartupError, match="damaged computes nothing but numbers that are"):
            warm_up(model, 4096)
    assert model.tokens == 4096
    assert find_shared_prefixes(model.sequences) is None
    assert {ids[-1] for ids in model.sequences} == {2}


def simulate_gpu(monkeypatch, **functions) -> None:
    quiet = {"reset_peak_memory_stats": lambda _: None, "synchronize": lambda _: None}
    for name, fake in (quiet | functions).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(module, "empty_cuda_cache", lambda: None)


@pytest.mark.parametrize(
    ("gigabytes", "max_length", "fit", "measured", "chosen"),
    [
        # 12 texts of 8,192 tokens are promised: small sizes, which say little, are not measured.
        (80, 8192, 10_000, [512, 1024, 2048, 4096, 8192], 10_000),
        (80, 8192, 100, [128], 100),
        (1, 16, 10**6, [256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536], 32_768),
    ],
)
def test_token_budget_on_a_gpu_measures_every_possible_size(
    monkeypatch, gigabytes, max_length, fit, measured, chosen
) -> None:
    model, sizes = Recorder(max_length), []

    def seconds(run) -> float:
        run()
        sizes.append(model.tokens)
        return 2e-3 + sizes[-1] * 1e-6

    simulate_gpu(
        monkeypatch,
        get_device_properties=lambda _: SimpleNamespace(total_memory=gigabytes * GIB),
        memory_allocated=lambda _: 77,
        max_memory_allocated=lambda _: 77 + 4096,  # A byte for each token.
        mem_get_info=lambda _: (round(fit / 0.8), 10**12),
    )
    monkeypatch.setattr(module, "time_fastest_run", seconds)
    *_, budget = probe_budget(model, GPU)
    assert (budget.tokens, sizes) == (chosen, measured)


def test_gpu_memory_is_measured_with_long_texts_too(monkeypatch) -> None:
    """A model whose attention takes a byte for each pair of tokens of one text."""
    model = Recorder(8192)
    simulate_gpu(
        monkeypatch,
        memory_allocated=lambda _: 0,
        max_memory_allocated=lambda _: sum(len(ids) ** 2 for ids in model.sequences),
        mem_get_info=lambda _: (10 * 4096**2, 10 * 4096**2),
    )
    assert measure_gpu_capacity(model, GPU) == 8 * 4096


MIB = 2**20


@pytest.mark.parametrize(
    ("left", "workers", "tokens", "fit"),
    [
        # A third of the memory that is left beyond 32 MiB, at 10 KiB for a token.
        (92 * MIB, 2, 240, 1024),
        (8 * GIB + 32 * MIB, 1, 4096, (8 * GIB // 3) // 10_240),
        (8 * GIB + 32 * MIB + 1, 1, None, None),
        (10_240 * 512 * 3 // 2 + 32 * MIB, 1, 60, 256),
        (10_240 * 512 * 3 // 2 + 31 * MIB, 1, 52, "a text of 512 tokens needs at least 1 MB more"),
        (33 * MIB, 1, 32, "1 MB are left for forwards and requests"),
        (32 * MIB, 1, None, "0 MB are left for forwards and requests"),
    ],
)
def test_cpu_memory_limits_a_forward_or_stops_the_start(
    monkeypatch, left, workers, tokens, fit
) -> None:
    model, sizes = Recorder(512), []

    def take(run) -> int:
        run()
        sizes.append((model.tokens, max(map(len, model.sequences))))
        return 10_240 * model.tokens

    monkeypatch.setattr(module, "host_memory_left", lambda: left)
    monkeypatch.setattr(module, "measure_peak_growth", take)
    if isinstance(fit, str):
        with pytest.raises(StartupError, match=f"damaged does not fit the memory.* {fit}"):
            measure_host_capacity(model, workers)
    else:
        assert measure_host_capacity(model, workers) == fit
    assert sizes == ([] if tokens is None else [(tokens, min(tokens, 256))])


SMALLEST = "the smallest within 3 % of the best, 100 tokens/s at "
PROMISED = "the minimum promised for this length and memory"


@pytest.mark.parametrize(
    ("rates", "minimum", "tokens", "reason"),
    [
        ([97, 100], 0, 97, f"{SMALLEST}200"),
        ([96, 100], 0, 200, f"{SMALLEST}200"),
        ([100, 50], 100, 100, f"{SMALLEST}100"),
        ([100, 50], 1000, 1000, PROMISED),
        ([100, 50], 1001, 1000, "a forward takes 10 seconds; more is promised for this memory"),
    ],
)
def test_token_budget_is_the_smallest_of_the_fastest_or_the_minimum(
    rates, minimum, tokens, reason
) -> None:
    measured = [Measurement(rate * n, n) for n, rate in enumerate(rates, 1)]
    budget = choose_budget(measured, minimum, longest=10.0)
    assert (budget.tokens, budget.reason) == (tokens, reason)


@pytest.mark.parametrize(
    ("tokens", "most", "kept", "reason"),
    [
        (8192, 8192, 8192, "measured"),
        (8192, 8191, 8191, "limited by the memory"),
        (8192, None, 8192, "measured"),
        (8192, -5, 1, "limited by the memory"),
    ],
)
def test_token_budget_is_capped_by_memory_unless_max_batch_tokens_is_set(
    tokens, most, kept, reason
) -> None:
    budget = cap_budget(MeasuredBudget(tokens, "measured", 0.5), most)
    assert budget == MeasuredBudget(kept, reason, 0.5)
    assert choose_budget(MEASURED, minimum=tokens, most=most).tokens == kept
    assert apply_budget_setting(budget, "auto") == budget
    assert apply_budget_setting(budget, 77) == MeasuredBudget(77, "MAX_BATCH_TOKENS", 0.5)
    limited = MeasuredBudget(512, "measured", 0.5, most=700)
    assert apply_budget_setting(limited, 8192).tokens == 700


@pytest.mark.parametrize(
    ("length", "memory", "tokens"),
    [
        *((8192, memory * GIB, 8192 * count) for memory, count in ((80, 12), (8, 6), (4, 3))),
        (513, 3 * GIB, 3 * 513),
        *((512, memory * GIB, 512 * n) for memory, n in ((80, 128), (8, 64), (6, 32), (4, 16))),
        (512, None, 512 * 16),
        (8192, None, 512),  # A CPU has a minimum, too.
    ],
)
def test_minimum_tokens_by_length_and_memory(length, memory, tokens) -> None:
    assert minimum_tokens(length, memory) == tokens
