"""The token budget after a batch that did not fit."""

from smart_embedder.engine.devices.limits import TokenBudget


def test_it_shrinks_to_half_of_what_was_too_much_and_never_below_one() -> None:
    budget = TokenBudget(1000)
    budget.shrink(800)
    assert budget.limits.max_tokens == 400
    for _ in range(20):
        budget.shrink(budget.limits.max_tokens)
    assert budget.limits.max_tokens == 1


def test_a_small_batch_that_did_not_fit_after_the_budget_shrank_does_not_raise_it() -> None:
    budget = TokenBudget(1000)
    budget.shrink(200)
    budget.shrink(900)
    assert budget.limits.max_tokens == 100


def test_it_recovers_slowly_and_never_beyond_where_it_began() -> None:
    budget = TokenBudget(1000)
    budget.shrink(1000)
    budget.recover()
    assert budget.limits.max_tokens == 510
    for _ in range(200):
        budget.recover()
    assert budget.limits.max_tokens == 1000
