"""The token budget: small, fast, as large as promised, and no larger than the memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.models.budget import (
    ChosenBudget,
    Measurement,
    capped,
    choose_budget,
    minimum_tokens,
    named_or_chosen,
)

GIB = 2**30
MEASURED = [
    Measurement(256, 0.256 / 0.6),
    Measurement(512, 0.512 / 0.96),
    Measurement(1024, 1.024 / 0.98),
    Measurement(2048, 2.048),
]


def test_it_is_the_smallest_within_three_percent_of_the_best() -> None:
    budget = choose_budget(MEASURED, minimum=0)
    assert budget.tokens == 1024
    assert budget.reason == "the smallest within 3 % of the best, 1000 tokens/s at 2048"
    assert budget.seconds_per_token == pytest.approx(1 / 980)


def test_it_is_at_least_what_is_promised() -> None:
    budget = choose_budget(MEASURED, minimum=8192)
    assert (budget.tokens, "promised" in budget.reason) == (8192, True)


def test_what_is_promised_is_not_more_than_a_forward_may_take() -> None:
    budget = choose_budget(MEASURED, minimum=98_304, longest=2.0)
    assert (budget.tokens, "takes 2 seconds" in budget.reason) == (1959, True)
    assert choose_budget(MEASURED, minimum=98_304, longest=0.5).tokens == 1024


@pytest.mark.parametrize(
    ("tokens", "most", "kept", "reason"),
    [
        (8192, 600, 600, "what fits the memory"),
        (8192, 8192, 8192, "measured"),
        (8192, 8191, 8191, "what fits the memory"),
        (8192, None, 8192, "measured"),
        (8192, 0, 1, "what fits the memory"),
        (8192, -5, 1, "what fits the memory"),
    ],
)
def test_the_memory_has_the_last_word(tokens, most, kept, reason) -> None:
    budget = capped(ChosenBudget(tokens, "measured", 0.5), most)
    assert budget == ChosenBudget(kept, reason, 0.5)
    assert choose_budget(MEASURED, minimum=tokens, most=most).tokens == kept


def test_a_setting_takes_the_place_of_what_was_chosen() -> None:
    budget = ChosenBudget(8192, "measured", 0.5)
    assert named_or_chosen(budget, "auto") == budget
    assert named_or_chosen(budget, 77) == ChosenBudget(77, "MAX_BATCH_TOKENS", 0.5)


@pytest.mark.parametrize(
    ("rates", "minimum", "tokens", "reason"),
    [
        ([97, 100], 0, 97, "the smallest within 3 % of the best, 100 tokens/s at 200"),
        ([96, 100], 0, 200, "the smallest within 3 % of the best, 100 tokens/s at 200"),
        ([100, 50], 100, 100, "the smallest within 3 % of the best, 100 tokens/s at 100"),
        ([100, 50], 101, 101, "the least that is promised for this length and memory"),
        ([100, 50], 1000, 1000, "the least that is promised for this length and memory"),
        ([100, 50], 1001, 1000, "what takes 10 seconds, less than is promised for this memory"),
    ],
)
def test_the_reason_tells_what_decided(rates, minimum, tokens, reason) -> None:
    measured = [Measurement(rate * n, n) for n, rate in enumerate(rates, 1)]
    budget = choose_budget(measured, minimum, longest=10.0)
    assert (budget.tokens, budget.reason) == (tokens, reason)


@given(
    st.lists(st.floats(0.001, 10), min_size=1, max_size=8),
    st.integers(0, 100_000),
    st.none() | st.integers(1, 100_000),
)
def test_every_machine_gets_a_budget(seconds, promised, most) -> None:
    measured = [Measurement(128 * 2**n, each) for n, each in enumerate(seconds)]
    budget = choose_budget(measured, promised, most)
    assert budget.tokens >= 1
    assert most is None or budget.tokens <= most
    assert budget.tokens >= min(promised, most or promised)


@pytest.mark.parametrize(
    ("length", "memory", "sequences"),
    [
        (8192, 80 * GIB, 12),
        (8192, 8 * GIB, 6),
        (8192, 4 * GIB, 3),
        (513, 3 * GIB, 3),
        (512, 80 * GIB, 128),
        (512, 8 * GIB, 64),
        (512, 6 * GIB, 32),
        (512, 4 * GIB, 16),
        (512, None, 16),
    ],
)
def test_the_least_for_each_length_and_memory(length, memory, sequences) -> None:
    assert minimum_tokens(length, memory) == sequences * length


def test_on_a_cpu_a_busy_moment_does_not_make_the_budget_tiny() -> None:
    assert minimum_tokens(8192, None) == minimum_tokens(16, None) == 512
