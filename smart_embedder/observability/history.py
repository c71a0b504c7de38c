"""What a process did in the last fifteen minutes, and for whom, for those who ask later."""

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from smart_embedder.observability.metrics import Metrics

SECONDS = 5.0
KEPT_SECONDS = 900.0
MOST_CLIENTS = 1000
_SHOWN_CLIENTS = 20
# Names of tokens are the operator's, of any length.
_MOST_CHARACTERS = 64
Figures = dict[str, float | None]


class History:
    """A ring of figures, one every five seconds, whether anybody asks for them or not.

    Each is of the ten seconds before it. A sample takes about a millisecond.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._figures: deque[tuple[float, Figures]] = deque(maxlen=int(KEPT_SECONDS / SECONDS))
        self._totals: deque[tuple[dict[str, float], dict[float, float]]] = deque(maxlen=2)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Take a sample now and every five seconds of the running loop, until `close`."""
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self.start)
        self.take(time.monotonic())

    async def close(self) -> None:
        """Take no more samples."""
        if self._timer is not None:
            self._timer.cancel()

    def recent(self, now: float) -> list[Figures]:
        """The figures of the last fifteen minutes, the oldest first, each with its `age`."""
        aged = ((now - at, figures) for at, figures in self._figures)
        return [{**figures, "age": round(age, 1)} for age, figures in aged if age <= KEPT_SECONDS]

    def take(self, now: float) -> None:
        """Take a sample; `now` is a time of the monotonic clock in seconds."""
        metrics = self._metrics
        totals, requests = self._read_totals(now)
        before, requests_before = self._totals[0] if self._totals else (totals, requests)
        self._totals.append((totals, requests))
        grown = {name: total - before[name] for name, total in totals.items()}
        seconds = max(grown["at"], 0.001)
        answered = {limit: count - requests_before[limit] for limit, count in requests.items()}
        figures: Figures = {
            "requests": grown["requests"] / seconds,
            "latency": quantile(answered, 0.95),
            "median": quantile(answered, 0.5),
            "tokens": grown["tokens"] / seconds,
            "queue": _sum(metrics.queue_size),
            "forward_tokens": grown["in_forwards"] / max(grown["forwards"], 1) or None,
            "refused": grown["refused"],
            "failed": grown["failed"],
            "memory": _sum(metrics.process, "process_resident_memory_bytes") or None,
        }
        self._figures.append((now, figures))

    def _read_totals(self, now: float) -> tuple[dict[str, float], dict[float, float]]:
        """Totals since the start, and the requests up to each limit of their seconds."""
        metrics, requests = self._metrics, defaultdict[float, float](float)
        for sample in _samples(metrics.embedding_duration, metrics.rerank_duration):
            if sample.name.endswith("_bucket"):
                requests[float(sample.labels["le"])] += sample.value
        answered = [
            sample
            for sample in _samples(metrics.embedding_requests, metrics.rerank_requests)
            if sample.name.endswith("_total")
        ]
        failed = (each for each in answered if each.labels["status"] in {"error", "timeout"})
        totals = {
            "at": now,
            "requests": sum(each.value for each in answered),
            "failed": sum(each.value for each in failed),
            "refused": metrics.total(metrics.embedding_rejected)
            + metrics.total(metrics.rerank_rejected),
            "tokens": metrics.total(metrics.tokens),
            "forwards": _sum(metrics.batch_tokens, "embedder_batch_tokens_count"),
            "in_forwards": _sum(metrics.batch_tokens, "embedder_batch_tokens_sum"),
        }
        return totals, requests

    def present(self) -> dict[str, Any]:
        """What is known of now and since the start beside the figures."""
        metrics, refused = self._metrics, Counter[str]()
        for sample in _samples(metrics.embedding_rejected, metrics.rerank_rejected):
            if sample.name.endswith("_total") and sample.value:
                refused[sample.labels["reason"]] += int(sample.value)
        return {
            "active_requests": _sum(metrics.embedding_active) + _sum(metrics.rerank_active),
            "tokens": metrics.total(metrics.tokens),
            "queue_capacity": _sum(metrics.queue_capacity),
            "refused": dict(refused.most_common()),
            "abandoned": metrics.total(metrics.abandoned),
            "gpu_memory": {kind: _sum(gauges[-1]) for kind, gauges in metrics.memory.items()},
        }


def _samples(*collectors: Collector) -> Iterator[Sample]:
    families: Iterator[Metric] = (each for one in collectors for each in one.collect())
    return (sample for family in families for sample in family.samples)


def _sum(collector: Collector, name: str = "") -> float:
    """The sum of a collector's samples, or of those of a name."""
    return sum(each.value for each in _samples(collector) if name in {"", each.name})


def quantile(counts: dict[float, float], share: float) -> float | None:
    """The value below which a share of a histogram lies, interpolated as Prometheus does it.

    `counts` are those up to each upper limit, the last one infinite. None where all are zero.
    """
    limits = sorted(counts)
    wanted = share * counts[limits[-1]] if limits else 0
    lowest, below = 0.0, 0.0
    for limit in limits:
        if wanted and counts[limit] >= wanted:
            if limit == limits[-1]:
                return lowest
            return lowest + (limit - lowest) * (wanted - below) / (counts[limit] - below)
        lowest, below = limit, counts[limit]
    return None


class Clients:
    """The requests of each client of late, and how many of them were refused.

    Of more than a thousand those that were away for the longest are counted together.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[str, list[int]] = OrderedDict()
        self._others = [0, 0]

    def count(self, client: str, *, refused: bool) -> None:
        """Count a request; `client` is the name of a token or an address."""
        counts = self._counts.setdefault(client, [0, 0])
        self._counts.move_to_end(client)
        counts[0] += 1
        counts[1] += refused
        if len(self._counts) > MOST_CLIENTS:
            _, forgotten = self._counts.popitem(last=False)
            self._others = [sum(each) for each in zip(self._others, forgotten, strict=True)]

    def busiest(self) -> list[dict[str, Any]]:
        """The twenty with the most requests, and all others as one without a name."""
        ordered = sorted(self._counts.items(), key=lambda each: each[1], reverse=True)
        shown = [(name[:_MOST_CHARACTERS], *counts) for name, counts in ordered[:_SHOWN_CLIENTS]]
        rest = [counts for _, counts in ordered[_SHOWN_CLIENTS:]] + [self._others]
        requests, refused = (sum(each) for each in zip(*rest, strict=True))
        if requests:
            shown.append((None, requests, refused))
        return [dict(zip(("client", "requests", "refused"), each, strict=True)) for each in shown]
