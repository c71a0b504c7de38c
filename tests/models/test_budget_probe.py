"""The start-up probe: what it measures, and that it ends in time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from smart_embedder.errors import StartupError
from smart_embedder.models import budget as probe
from smart_embedder.models.batch.packing import find_shared_prefixes
from smart_embedder.models.budget import measure
from smart_embedder.models.device.transfer import not_finite

CPU = torch.device("cpu")


def test_it_stops_before_a_size_whose_forward_would_take_too_long() -> None:
    found = list(measure(lambda tokens: tokens / 1000, [128, 256, 512, 1024]))
    assert [one.tokens for one in found] == [128, 256, 512]


def test_the_first_size_is_measured_however_long_it_takes() -> None:
    (found,) = measure(lambda tokens: tokens / 10, [512, 1024])
    assert (found.tokens, found.seconds) == (512, 51.2)


def test_it_stops_where_a_larger_batch_is_no_faster() -> None:
    seconds = {512: 1.0, 1024: 1.5, 2048: 2.95, 4096: 5.0}
    found = list(measure(seconds.__getitem__, list(seconds), longest=100))
    assert [one.tokens for one in found] == [512, 1024, 2048]


def test_a_busy_moment_at_a_small_size_does_not_end_it() -> None:
    seconds = {128: 1.0, 256: 9.0, 512: 2.0, 1024: 3.0, 2048: 6.5}
    found = list(measure(seconds.__getitem__, list(seconds), longest=100))
    assert [one.tokens for one in found] == [128, 256, 512, 1024, 2048]


def test_on_a_real_model_it_chooses_one_of_the_sizes(embedder) -> None:
    budget = probe.probe(embedder, CPU)
    assert budget.tokens in probe._SIZES  # the sizes are its own affair
    assert budget.seconds_per_token > 0


def test_no_size_is_measured_that_would_keep_others_waiting(embedder, monkeypatch) -> None:
    seen: list[int] = []

    def a_second(run) -> float:
        run()
        return 1.0

    launch = type(embedder).launch

    def note(self, sequences, outputs):
        seen.append(sum(map(len, sequences)))
        return launch(self, sequences, outputs)

    monkeypatch.setattr(probe, "shortest", a_second)
    monkeypatch.setattr(type(embedder), "launch", note)
    *steps, budget = probe.probe_in_steps(embedder, CPU, longest_run=0.5)
    assert set(steps) == {None}
    assert budget is not None
    # The first one tells that all others would take longer.
    assert seen == [128, 512]
    assert budget.tokens == 512


class Recorder:
    """Takes note of what it is asked for."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.sequences: list[np.ndarray] = []

    def launch(self, sequences, outputs):
        self.sequences = sequences
        return list


@pytest.mark.parametrize("longest", [16, 8192])
def test_no_text_that_is_measured_begins_like_another(longest: int) -> None:
    """A causal model would compute it once, and look far faster and smaller than it is."""
    model = Recorder(longest)
    probe.warm_up(model, 4096)
    assert sum(map(len, model.sequences)) == 4096
    assert find_shared_prefixes(model.sequences) is None


@pytest.mark.parametrize(("failed", "stops"), [(16, True), (15, False), (0, False)])
def test_a_model_that_computes_no_finite_number_stops_the_start(failed: int, stops: bool) -> None:
    model = Recorder(256)
    model.name = "damaged"
    results = [not_finite()] * failed + [1.0] * (16 - failed)
    model.launch = lambda sequences, _: lambda: results[: len(sequences)]
    if stops:
        with pytest.raises(StartupError, match="damaged computes nothing but numbers that are"):
            probe.warm_up(model, 4096)
    else:
        probe.warm_up(model, 4096)


@pytest.mark.parametrize(
    ("gigabytes", "max_length", "fit", "measured", "chosen"),
    [
        # 12 texts of 8,192 tokens are promised: nothing below half of what is weighty is measured.
        (80, 8192, 10**6, [512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536], 98_304),
        (80, 8192, 10_000, [512, 1024, 2048, 4096, 8192], 10_000),
        (80, 8192, 100, [128], 100),
        (1, 16, 10**6, [256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536], 32_768),
    ],
)
def test_on_a_gpu_every_size_is_measured_that_may_be_chosen(
    monkeypatch, gigabytes, max_length, fit, measured, chosen
) -> None:
    model, sizes = Recorder(max_length), []

    def seconds(run) -> float:
        run()
        sizes.append(sum(map(len, model.sequences)))
        return 2e-3 + sizes[-1] * 1e-6

    used = 4096  # A byte for each token.
    gpu = {
        "get_device_properties": lambda _: SimpleNamespace(total_memory=gigabytes * 2**30),
        "memory_allocated": lambda _: 77,
        "max_memory_allocated": lambda _: 77 + used,
        "reset_peak_memory_stats": lambda _: None,
        "mem_get_info": lambda _: (round(fit / 0.8), 10**12),
        "synchronize": lambda _: None,
    }
    for name, stand_in in gpu.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(probe, "empty_cuda_cache", lambda: None)
    monkeypatch.setattr(probe, "shortest", seconds)
    budget = probe.probe(model, torch.device("cuda"))
    assert sizes == measured
    assert budget.tokens == chosen


def test_a_cpu_does_not_tell_how_many_tokens_fit(embedder) -> None:
    assert probe.tokens_that_fit(embedder, CPU) is None


def test_memory_is_measured_with_long_texts_too(monkeypatch) -> None:
    """A model whose attention takes a byte for each pair of tokens of one text."""
    model = Recorder(8192)
    gpu = {
        "memory_allocated": lambda _: 0,
        "max_memory_allocated": lambda _: sum(len(ids) ** 2 for ids in model.sequences),
        "reset_peak_memory_stats": lambda _: None,
        "mem_get_info": lambda _: (10 * 4096**2, 10 * 4096**2),
    }
    for name, stand_in in gpu.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(probe, "empty_cuda_cache", lambda: None)
    assert probe.tokens_that_fit(model, torch.device("cuda")) == 8 * 4096
