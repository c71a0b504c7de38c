"""The pure batcher: budget, fairness, order, and that nobody waits for ever."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.engine.records import Outputs
from smart_embedder.engine.scheduling.batcher import (
    QUANTUM_TOKENS,
    Batch,
    Flow,
    Limits,
    form_batch,
    weight_of,
)
from smart_embedder.engine.scheduling.job import Job
from smart_embedder.engine.scheduling.queue import JobQueue
from tests.engine.fakes import FakeModel

MODEL = FakeModel()
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def job(
    *lengths: int,
    virtual_start: float = 0.0,
    model: FakeModel = MODEL,
    urgency: int = 3,
    client: str = "",
) -> Job:
    sequences = [np.zeros(length, np.int64) for length in lengths]
    weight = weight_of(urgency)
    made = Job(model, sequences, Outputs(dense=True), client=client, weight=weight)
    made.enter(virtual_start, lambda _: None)
    return made


def choose(jobs: list[Job], limits: Limits) -> Batch:
    """The batch that `form_batch` makes of jobs of one client."""
    return form_batch(dict.fromkeys(jobs, Flow()), lambda _: limits)


def taken(batch: Batch, jobs: list[Job]) -> list[tuple[int, int, int]]:
    return [(jobs.index(part.job), part.start, part.stop) for part in batch.slices]


def test_everything_that_fits_goes_in_one_batch() -> None:
    jobs = [job(2, 3), job(4)]
    assert taken(choose(jobs, Limits(9)), jobs) == [(0, 0, 2), (1, 0, 1)]


def test_a_request_larger_than_the_budget_is_spread_over_batches() -> None:
    jobs = [job(4, 4, 4)]
    assert taken(choose(jobs, Limits(9)), jobs) == [(0, 0, 2)]


def test_a_sequence_longer_than_the_budget_goes_alone() -> None:
    jobs = [job(50), job(1, virtual_start=32.0)]
    assert taken(choose(jobs, Limits(9)), jobs) == [(0, 0, 1)]


def test_a_short_request_rides_with_a_long_one_that_came_first() -> None:
    jobs = [job(*[3] * 10), job(2)]
    assert taken(choose(jobs, Limits(9)), jobs) == [(1, 0, 1), (0, 0, 2)]


def test_a_long_text_is_held_back_no_longer_than_a_sentence_would_be() -> None:
    jobs = [job(8192), job(20, virtual_start=13.0), job(20, virtual_start=11.0)]
    assert taken(choose(jobs, Limits(9)), jobs) == [(2, 0, 1)]
    assert taken(choose(jobs[:2], Limits(9)), jobs) == [(0, 0, 1)]


def test_two_long_requests_share_a_batch_evenly() -> None:
    jobs = [job(*[2] * 10), job(*[2] * 10)]
    assert taken(choose(jobs, Limits(8)), jobs) == [(0, 0, 2), (1, 0, 2)]


def test_one_that_does_not_fit_keeps_its_turn_while_smaller_ones_fill_the_batch() -> None:
    jobs = [job(5), job(8), job(3, virtual_start=6.0)]
    assert taken(choose(jobs, Limits(9)), jobs) == [(0, 0, 1), (2, 0, 1)]
    assert taken(choose(jobs[1:2], Limits(9)), jobs) == [(1, 0, 1)]


@pytest.mark.parametrize(("lead", "is_taken"), [(53, True), (54, True), (55, False)])
@pytest.mark.parametrize("of_one_client", [True, False])
def test_beside_one_that_was_passed_over_nobody_is_ahead_by_more_than_a_forward(
    lead: int, is_taken: bool, of_one_client: bool
) -> None:
    """The rest of a forward of 64 tokens, in which 100 do not fit, is no gift."""
    virtual_start = float(QUANTUM_TOKENS + lead)
    first, _, short = jobs = [job(40), job(100), job(10)]
    if of_one_client:
        flows = [Flow()] * 3
        jobs[2] = short = job(10, virtual_start=virtual_start)
    else:
        flows = [Flow(), Flow(), Flow(virtual_start)]
    batch = form_batch(dict(zip(jobs, flows, strict=True)), lambda _: Limits(64))
    assert [part.job for part in batch.slices] == [first, *([short] if is_taken else [])]


def test_a_batch_is_for_one_model_that_of_whoever_is_next() -> None:
    other = FakeModel()
    jobs = [job(2, virtual_start=5.0), job(2, model=other), job(2, virtual_start=5.0)]
    batch = choose(jobs, Limits(9))
    assert batch.model is other
    assert taken(batch, jobs) == [(1, 0, 1)]


def test_a_model_may_limit_how_many_sequences_a_forward_holds() -> None:
    limited = FakeModel()
    limited.max_batch_sequences = 3
    jobs = [job(1, 1, 1, model=limited), job(1, 1, model=limited)]
    assert taken(choose(jobs, Limits(100)), jobs) == [(0, 0, 2), (1, 0, 1)]


def test_forming_a_batch_changes_no_job() -> None:
    jobs = [job(2, 3), job(4)]
    first = taken(choose(jobs, Limits(5)), jobs)
    assert taken(choose(jobs, Limits(5)), jobs) == first
    assert [j.taken for j in jobs] == [0, 0]


@given(st.lists(LENGTHS, min_size=1, max_size=6), st.integers(1, 60))
def test_a_batch_keeps_the_budget_or_is_one_sequence(requests, budget) -> None:
    batch = choose([job(*lengths) for lengths in requests], Limits(budget))
    assert batch.tokens <= budget or len(batch.sequences) == 1
    assert len(batch.sequences) >= 1


@given(st.lists(LENGTHS, min_size=1, max_size=6), st.integers(1, 200))
def test_halving_a_batch_loses_and_repeats_nothing(requests, budget) -> None:
    jobs = [job(*lengths) for lengths in requests]
    batch = choose(jobs, Limits(budget))
    first, second = batch.halves()
    assert 0 <= len(second.sequences) - len(first.sequences) <= 1
    both = [part for half in (first, second) for part in half.slices]
    assert sum(part.tokens for part in both) == batch.tokens
    places = [(jobs.index(s.job), place) for s in both for place in range(s.start, s.stop)]
    assert sorted(places) == sorted(
        (jobs.index(s.job), place) for s in batch.slices for place in range(s.start, s.stop)
    )


async def drain(requests: list[list[int]], budget: int) -> list[list[tuple[int, int, int]]]:
    queue = JobQueue()
    jobs = [job(*lengths) for lengths in requests]
    for each in jobs:
        queue.put(each)
    batches = []
    while (batch := queue.take(lambda _: Limits(budget))) is not None:
        batches.append(taken(batch, jobs))
    return batches


@given(st.lists(LENGTHS, min_size=1, max_size=6), st.integers(1, 60))
def test_every_sequence_is_taken_exactly_once_and_in_order(requests, budget) -> None:
    batches = asyncio.run(drain(requests, budget))
    for index, lengths in enumerate(requests):
        spans = [(start, stop) for batch in batches for i, start, stop in batch if i == index]
        assert [place for span in spans for place in range(*span)] == list(range(len(lengths)))


async def test_a_newcomer_is_served_in_the_next_batch_under_a_bulk_load() -> None:
    queue = JobQueue()
    bulk = [job(*[4] * 500) for _ in range(3)]
    for each in bulk:
        queue.put(each)
    for _ in range(50):
        queue.take(lambda _: Limits(16))
    newcomer = job(4)
    queue.put(newcomer)
    batch = queue.take(lambda _: Limits(16))
    assert batch is not None
    assert newcomer in [part.job for part in batch.slices]


async def test_a_long_request_is_not_starved_by_a_stream_of_short_ones() -> None:
    """Twenty short rivals at every moment, each gone after one batch and replaced at once."""
    queue = JobQueue()
    bulk = job(*[4] * 20)
    queue.put(bulk)
    rivals: list[Job] = []
    batches = 0
    while bulk.waiting:
        rivals = [rival for rival in rivals if rival.waiting]
        for rival in [job(4) for _ in range(20 - len(rivals))]:
            queue.put(rival)
            rivals.append(rival)
        queue.take(lambda _: Limits(16))
        batches += 1
    # An equal share for 21 is 16 / 21 tokens of each batch; the bulk's 80 tokens need 105 batches.
    assert batches <= 110


def test_of_two_equal_newcomers_the_more_urgent_goes_first() -> None:
    jobs = [job(4, urgency=7), job(4), job(4, urgency=0)]
    order = taken(choose(jobs, Limits(12)), jobs)
    assert order == [(2, 0, 1), (1, 0, 1), (0, 0, 1)]


def test_a_rest_that_an_urgent_newcomer_may_not_have_is_not_for_one_that_is_less_urgent() -> None:
    """Both are ahead of the long text that is passed over, the urgent one by more of its tokens."""
    first, long = job(60), job(50, virtual_start=1.0, urgency=5)
    urgent, other = job(5, virtual_start=300.0), job(5, virtual_start=300.0, urgency=5)
    for jobs, expected in (
        ([first, long, other], [(0, 0, 1), (2, 0, 1)]),
        ([first, long, other, urgent], [(0, 0, 1)]),
    ):
        assert taken(choose(jobs, Limits(100)), jobs) == expected
    after = job(5, 5, virtual_start=300.0)
    after.take(1, 0.0)
    jobs = [first, long, after, other]
    assert taken(choose(jobs, Limits(100)), jobs) == [(0, 0, 1), (3, 0, 1)], "it has had its turn"


async def test_an_urgent_newcomer_overtakes_those_who_still_wait() -> None:
    queue = JobQueue()
    for _ in range(100):
        queue.put(job(20))
    queue.take(lambda _: Limits(200))
    urgent = job(20, urgency=0)
    queue.put(urgent)
    batch = queue.take(lambda _: Limits(200))
    assert batch is not None
    assert batch.slices[0].job is urgent


async def test_each_step_of_urgency_doubles_the_share_of_the_device() -> None:
    queue = JobQueue()
    jobs = [job(*[4] * 4000, urgency=urgency) for urgency in (2, 3, 4, 7)]
    for each in jobs:
        queue.put(each)
    for _ in range(400):
        queue.take(lambda _: Limits(16))
    shares = [each.taken / 1600 for each in jobs]
    assert shares == pytest.approx([32 / 57, 16 / 57, 8 / 57, 1 / 57], abs=0.005)


async def test_the_least_urgent_is_not_starved_by_a_stream_of_the_most_urgent() -> None:
    """Ten urgent rivals at every moment: the share of the last is 1 in 1281, and it gets it."""
    queue = JobQueue()
    last = job(4, urgency=7)
    queue.put(last)
    rivals: list[Job] = []
    batches = 0
    while last.waiting:
        rivals = [rival for rival in rivals if rival.waiting]
        for rival in [job(4, urgency=0) for _ in range(10 - len(rivals))]:
            queue.put(rival)
            rivals.append(rival)
        queue.take(lambda _: Limits(16))
        batches += 1
    assert batches <= 4 * 1281 / 16 + 10


@given(st.lists(st.tuples(LENGTHS, st.integers(0, 7)), min_size=1, max_size=6), st.integers(1, 60))
def test_no_urgency_changes_what_is_taken_only_when(requests, budget) -> None:
    queue = JobQueue()
    jobs = [job(*lengths, urgency=urgency) for lengths, urgency in requests]
    asyncio.run(put_all(queue, jobs))
    batches = 0
    while queue.take(lambda _: Limits(budget)) is not None:
        batches += 1
    assert batches <= sum(len(lengths) for lengths, _ in requests)
    assert not any(each.waiting for each in jobs)


async def put_all(queue: JobQueue, jobs: list[Job]) -> None:
    for each in jobs:
        queue.put(each)


async def test_a_job_whose_caller_has_left_is_never_batched() -> None:
    queue = JobQueue()
    gone, here = job(4), job(4)
    queue.put(gone)
    queue.put(here)
    gone.cancel()
    await gone.dequeued()
    batch = queue.take(lambda _: Limits(16))
    assert batch is not None
    assert [part.job for part in batch.slices] == [here]
    assert queue.take(lambda _: Limits(16)) is None


async def test_a_client_gains_nothing_by_sending_its_work_as_many_requests() -> None:
    """A hundred requests of one beside one of another: each has half of every batch."""
    queue = JobQueue()
    alices = [job(*[4] * 50, client="alice") for _ in range(100)]
    bob = job(*[4] * 400, client="bob")
    for each in (*alices, bob):
        queue.put(each)
    for _ in range(100):
        queue.take(lambda _: Limits(16))
    assert bob.taken == pytest.approx(200, abs=8)


async def test_a_client_with_one_request_at_a_time_is_always_in_the_next_batch() -> None:
    queue = JobQueue()
    for _ in range(300):
        queue.put(job(*[20] * 64, client="alice"))
    for _ in range(50):
        bob = job(20, client="bob")
        queue.put(bob)
        queue.take(lambda _: Limits(512))
        assert not bob.waiting
        queue.put(job(*[20] * 64, client="alice"))


async def test_what_a_client_did_while_it_was_alone_is_not_held_against_it() -> None:
    """Alice works alone, beside a rival who never wants much; then Carol comes with a bulk."""
    queue = JobQueue()
    alice, carol = job(*[4] * 5000, client="alice"), job(*[4] * 1000, client="carol")
    queue.put(alice)
    for _ in range(200):
        queue.put(job(1, client="bob"))
        queue.take(lambda _: Limits(64))
    before = alice.taken
    queue.put(carol)
    for _ in range(20):
        queue.take(lambda _: Limits(64))
    assert alice.taken - before == pytest.approx(carol.taken, abs=32)


async def test_what_a_client_did_where_there_was_room_for_all_is_not_held_against_it() -> None:
    """Alice's requests fill the batches that hold all of Bob's, too; then Carol sends a bulk load.

    Bob always has a request that waits, as two clients with two connections each would have.
    """
    queue = JobQueue()
    queue.put(job(10, client="bob"))
    for _ in range(200):
        queue.put(job(*[100] * 9, client="alice"))
        queue.put(job(10, client="bob"))
        queue.take(lambda _: Limits(1000))
    bulk = job(*[100] * 3000, client="carol")
    queue.put(bulk)
    own = job(*[100] * 9, client="alice")
    queue.put(own)
    batches = 0
    while own.waiting:
        queue.take(lambda _: Limits(1000))
        batches += 1
    assert batches <= 4


async def test_what_one_device_does_for_a_request_is_not_held_against_it() -> None:
    """Another request of its client has waited for another device meanwhile."""
    here, there = FakeModel(), FakeModel()
    queue = JobQueue()
    queue.put(job(*[100] * 10, model=here))
    first = job(*[100] * 5000, model=there)
    queue.put(first)
    for _ in range(100):
        queue.take(lambda _: Limits(1000), lambda model: model is there)
    second = job(*[100] * 5000, model=there)
    queue.put(second)
    for _ in range(20):
        queue.take(lambda _: Limits(1000), lambda model: model is there)
    assert first.taken - 1000 == pytest.approx(second.taken, abs=20)


async def test_what_one_device_does_for_a_client_is_not_held_against_it_on_another() -> None:
    here, there = FakeModel(), FakeModel()
    queue = JobQueue()
    queue.put(job(*[100] * 5000, client="bob", model=there))
    alice = job(*[100] * 5000, client="alice", model=here)
    queue.put(alice)
    for _ in range(100):
        queue.take(lambda _: Limits(1000), lambda model: model is there)
    queue.put(job(*[100] * 5000, client="bob", model=here))
    carol = job(*[100] * 5000, client="carol", model=here)
    queue.put(carol)
    for _ in range(30):
        queue.take(lambda _: Limits(1000), lambda model: model is here)
    bob = 300 - alice.taken - carol.taken
    assert min(alice.taken, bob, carol.taken) >= 80


async def test_where_nobody_waits_no_client_is_remembered() -> None:
    queue = JobQueue()
    leaving = job(4, client="alice")
    queue.put(leaving)
    leaving.cancel()
    queue.put(job(*[4] * 10, client="alice"))
    queue.put(job(4, client="bob"))
    queue.take(lambda _: Limits(100))
    assert not queue._flows


async def test_urgency_counts_between_clients_too() -> None:
    queue = JobQueue()
    background = job(*[4] * 4000, urgency=7, client="alice")
    usual = job(*[4] * 4000, client="bob")
    for each in (background, usual):
        queue.put(each)
    for _ in range(400):
        queue.take(lambda _: Limits(16))
    assert background.taken == pytest.approx(1600 / 17, abs=4)


async def test_clients_that_have_gone_are_forgotten() -> None:
    queue = JobQueue()
    for number in range(100):
        queue.put(job(4, client=str(number)))
    while queue.take(lambda _: Limits(16)) is not None:
        pass
    queue.put(job(*[4] * 500, client="alice"))
    queue.take(lambda _: Limits(1000))
    queue.put(job(*[4] * 500, client="alice"))
    queue.take(lambda _: Limits(1000))
    assert set(queue._flows) <= {"alice"}


def test_a_batch_may_be_limited_in_requests_and_in_sequences() -> None:
    jobs = [job(1, 1), job(1, 1), job(1, 1)]
    assert taken(choose(jobs, Limits(9, max_requests=2)), jobs) == [(0, 0, 2), (1, 0, 2)]
    assert len(choose(jobs, Limits(9, max_sequences=4)).sequences) == 4


@given(st.lists(LENGTHS, min_size=1, max_size=6), st.integers(64, 4000))
def test_turns_of_several_sequences_keep_the_limits_too(requests, budget) -> None:
    limits = Limits(budget, max_sequences=7)
    jobs = [job(*lengths * 20) for lengths in requests]
    batch = choose(jobs, limits)
    assert batch.tokens <= budget
    assert len(batch.sequences) == min(7, sum(len(each.sequences) for each in jobs)) or (
        batch.tokens > budget - 30
    )


@pytest.mark.parametrize(
    ("lengths", "sequences", "expected"),
    [
        ([1] * 30, 15, [10, 5]),
        ([1] * 30, 25, [15, 10]),
        ([3] * 30, 4, [3, 1]),  # A fourth would make 12 tokens.
        ([4, 6, 1], 2, [2, 0]),  # Exactly 10.
        ([4, 7, 1], 2, [1, 1]),
        ([20, 1, 1], 2, [1, 1]),  # One that is longer than a turn is a turn.
    ],
)
def test_a_turn_holds_as_many_sequences_as_fit_a_64th_of_the_budget(
    lengths, sequences, expected
) -> None:
    jobs = [job(*lengths), job(*lengths)]
    batch = choose(jobs, Limits(64 * 10, max_sequences=sequences))
    count = {part.job: part.stop - part.start for part in batch.slices}
    assert [count.get(each, 0) for each in jobs] == expected


class Watched(list):
    """Sequences that count how often one of them is looked at."""

    looks = 0

    def __getitem__(self, place):
        self.looks += 1
        return super().__getitem__(place)


def test_thousands_of_short_sequences_are_taken_in_few_steps() -> None:
    sequences = Watched([np.zeros(1, np.int64)] * 6400)
    many = Job(MODEL, sequences, Outputs(dense=True))
    many.enter(0.0, lambda _: None)
    form_batch({many: Flow()}, lambda _: Limits(6400))
    assert sequences.looks <= 3 * 64


@given(st.permutations("abc"), st.integers(1, 6), st.integers(1, 6))
def test_the_limits_are_those_of_the_model_of_the_batch(order, tokens, sequences) -> None:
    models = {name: FakeModel() for name in "abc"}
    limits = {
        models["a"]: Limits(tokens),
        models["b"]: Limits(99, max_sequences=sequences),
        models["c"]: Limits(99),
    }
    jobs = [job(*[1] * 8, model=models[name]) for name in order]
    batch = form_batch(dict.fromkeys(jobs, Flow()), limits.__getitem__)
    assert batch.model is models[order[0]]
    assert batch.tokens == {"a": tokens, "b": sequences, "c": 8}[order[0]]
