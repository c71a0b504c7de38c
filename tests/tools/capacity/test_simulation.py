"""The simulation agrees with queueing theory, and its batches are those of the real queue."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smart_embedder.engine.records import Outputs
from smart_embedder.engine.scheduling.batcher import Limits
from smart_embedder.engine.scheduling.job import Job
from smart_embedder.engine.scheduling.queue import JobQueue
from tools.capacity.cost import Arrival, CostModel, Load, uniform
from tools.capacity.simulation import Devices, Simulation, simulate

# One request in each batch.
ALONE = Limits(10**6, max_requests=1)
MANY = Limits(512)
SERVICE = 0.01
CONSTANT = CostModel((SERVICE, 0.0, 0.0, 0.0))


def per_token(base: float, token: float) -> CostModel:
    return CostModel((base, 0.0, token, 0.0))


def arrivals(gaps: list[float], lengths: list[int]) -> list[Arrival]:
    times = np.cumsum(gaps)
    return [
        Arrival(float(time), str(place % 3), (length,))
        for place, (time, length) in enumerate(zip(times, lengths, strict=True))
    ]


REQUESTS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 200)), min_size=1, max_size=40)


@pytest.mark.parametrize("load", [0.4, 0.7])
def test_the_mean_wait_is_that_of_an_m_d_1_queue(load: float) -> None:
    """Pollaczek and Khinchine; the seed is fixed, so the sampling error is always the same."""
    asked = Load(load / SERVICE, uniform(1, 1))
    seen = simulate(asked, Devices(CONSTANT, ALONE), requests=8000)
    wait = np.mean(seen.latencies) - SERVICE
    assert wait == pytest.approx(load * SERVICE / (2 * (1 - load)), rel=0.1)
    assert seen.utilisation == pytest.approx(load, rel=0.05)


def test_requests_that_never_meet_take_what_they_cost() -> None:
    cost = CostModel((0.004, 0.001, 1e-4, 1e-6), (0.001, 0.0, 0.0), (0.002, 0.0, 1e-5))
    asked = arrivals([1.0] * 20, list(range(10, 210, 10)))
    seen = Simulation(Devices(cost, MANY)).run(asked)
    for arrival, latency in zip(asked, seen.latencies, strict=True):
        (n,) = arrival.lengths
        forward = 0.004 + 0.001 + 1e-4 * n + 1e-6 * n**2
        assert latency == pytest.approx(0.001 + forward + 0.002 + 1e-5 * n)


@settings(max_examples=30)
@given(REQUESTS, st.booleans(), st.integers(1, 3))
def test_every_request_is_answered_once_and_never_early(
    requests: list[tuple[int, int]], overlapping: bool, number: int
) -> None:
    cost = per_token(0.002, 5e-4)
    asked = arrivals([gap / 1000 for gap, _ in requests], [length for _, length in requests])
    seen = Simulation(Devices(cost, MANY, number, overlapping)).run(asked)
    assert len(seen.latencies) == len(asked)
    assert not seen.refused
    assert sum(seen.batches) == sum(sum(each.lengths) for each in asked)
    for arrival, latency in zip(asked, seen.latencies, strict=True):
        assert latency >= cost.forward(arrival.lengths) * (1 - 1e-9)
    assert 0 < seen.utilisation <= 1 + 1e-9


class ModelWithoutLimit:
    """A model whose batches may have any number of sequences."""

    max_batch_sequences = None


def test_the_batches_are_those_of_the_real_queue() -> None:
    """Requests of several clients that come at once, taken by hand and by a simulated device."""
    lengths = [300, 20, 20, 150, 90, 10, 40, 400, 5, 60]
    clients = [str(place % 3) for place in range(len(lengths))]
    queue, model = JobQueue(), ModelWithoutLimit()
    for client, length in zip(clients, lengths, strict=True):
        queue.put(Job(model, [np.zeros(length, np.int64)], Outputs(dense=True), client=client))
    by_hand = []
    while (batch := queue.take(lambda _: MANY)) is not None:
        by_hand.append(batch.tokens)
    # The first request keeps the device busy until all others are there.
    asked = [Arrival(0.0, "x", (7,))]
    asked += [Arrival(0.0, c, (n,)) for c, n in zip(clients, lengths, strict=True)]
    seen = Simulation(Devices(CONSTANT, MANY)).run(asked)
    assert seen.batches == [7, *by_hand]


def test_a_short_request_preempts_a_long_forward_where_forwards_do_not_overlap() -> None:
    cost = per_token(0.0, 1e-3)
    asked = [Arrival(0.0, "bulk", (500,)), Arrival(0.1, "query", (10,))]
    long, short = Simulation(Devices(cost, MANY)).run(asked).latencies
    assert short == pytest.approx(0.01)
    assert long == pytest.approx(0.51)
    long, short = Simulation(Devices(cost, MANY, overlapping=True)).run(asked).latencies
    assert (long, short) == pytest.approx((0.5, 0.41))


def test_a_request_that_comes_beside_a_forward_makes_it_longer() -> None:
    devices = Devices(CONSTANT, ALONE, interference=0.002)
    first, second = Simulation(devices).run(arrivals([0.0, 0.001], [1, 1])).latencies
    assert first == pytest.approx(0.012)
    assert second == pytest.approx(0.012 + 0.01 - 0.001)


def test_requests_at_once_wait_for_those_before_and_a_full_queue_refuses() -> None:
    devices = Devices(CONSTANT, ALONE, queue_places=2)
    seen = Simulation(devices).run(arrivals([0.0] * 5, [1] * 5))
    assert sorted(seen.latencies) == pytest.approx([SERVICE * n for n in range(1, 4)])
    assert seen.refused == 2


def test_two_devices_behind_one_queue_are_better_than_half_the_load_on_one() -> None:
    one = simulate(Load(60, uniform(1, 1)), Devices(CONSTANT, ALONE), requests=1500)
    two = simulate(Load(120, uniform(1, 1)), Devices(CONSTANT, ALONE, number=2), requests=1500)
    assert two.utilisation == pytest.approx(one.utilisation, rel=0.05)
    assert two.percentile(99) < one.percentile(99)
