"""What a process keeps of its last minutes, and of its clients."""

import pytest

from smart_embedder.observability.history import MOST_CLIENTS, Clients, History, quantile
from smart_embedder.observability.metrics import Metrics


def test_figures_are_of_the_ten_seconds_before_them_whenever_somebody_asks() -> None:
    metrics = Metrics()
    history, endpoint = History(metrics), metrics.embedding_endpoint("/embeddings/")
    metrics.tokens.labels("m")
    history.take(0)
    for seconds in (5, 10, 15):
        for status in ("success", "success", "error"):
            endpoint.requests[status].inc()
            endpoint.duration.observe(0.2)
        endpoint.rejected["auth"].inc()
        metrics.tokens.labels("m").inc(100)
        metrics.batch_tokens.observe(100)
        history.take(seconds)
    first, *_, last = history.recent(20)
    assert (first["age"], first["requests"], first["latency"]) == (20, 0, None)
    assert (last["age"], last["requests"], last["failed"], last["refused"]) == (5, 0.6, 2, 2)
    assert (last["tokens"], last["forward_tokens"]) == (20, 100)
    assert 0.1 < last["median"] < last["latency"] < 0.25
    assert history.present()["refused"] == {"auth": 3}


def test_fifteen_minutes_are_kept_and_nothing_that_is_older() -> None:
    history = History(Metrics())
    for step in range(400):
        history.take(step * 5.0)
    ages = [each["age"] for each in history.recent(1995)]
    assert ages == [895 - 5 * step for step in range(180)]
    # The machine slept for an hour.
    history.take(1995 + 3600)
    assert [each["age"] for each in history.recent(1995 + 3601)] == [1]


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ({}, None),
        ({0.1: 0, float("inf"): 0}, None),
        ({0.1: 0, 1.0: 4, float("inf"): 4}, 0.55),
        ({0.1: 2, 1.0: 4, float("inf"): 4}, 0.1),
        ({0.1: 0, 1.0: 0, float("inf"): 4}, 1.0),
    ],
)
def test_a_quantile_is_interpolated_as_prometheus_does_it(counts, wanted) -> None:
    assert quantile(counts, 0.5) == wanted


def test_the_busiest_clients_are_named_and_thousands_of_addresses_forgotten() -> None:
    clients = Clients()
    for number in range(5 * MOST_CLIENTS):
        clients.count(f"2001:db8:{number:x}::/64", refused=True)
        clients.count("token:" + "n" * 10_000, refused=False)
    first, second, *_, last = clients.busiest()
    assert first == {"client": "token:" + "n" * 58, "requests": 5 * MOST_CLIENTS, "refused": 0}
    assert (second["requests"], second["refused"]) == (1, 1)
    assert last == {"client": None, "requests": 4981, "refused": 4981}
    assert len(clients._counts) == MOST_CLIENTS
    assert len(clients.busiest()) == 21
