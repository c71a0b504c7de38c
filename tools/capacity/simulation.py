"""The service's own queue and batcher in virtual time, with devices that only take time.

Requests enter a real `JobQueue`, real batches are taken from it, and real `Preemption` lets short
jobs into a long forward; what is simulated is the clock, and a forward, which takes what the cost
model says. With more and more devices it tells how many a load needs.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from smart_embedder.engine.model import Model
from smart_embedder.engine.records import Outputs, TokenIds
from smart_embedder.engine.scheduling.batcher import Batch, Limits
from smart_embedder.engine.scheduling.job import Job
from smart_embedder.engine.scheduling.queue import (
    WORTH_PREEMPTING,
    JobQueue,
    Preemption,
    split_short,
)
from tools.capacity.cost import Arrival, CostModel, Load

# Requests that wait at most: MAX_QUEUE_SIZE.
QUEUE_PLACES = 200
# Then the devices cannot hold the load, and what else comes would tell nothing more.
_MOST_REFUSED = 20
# The first requests find an empty service.
_WARM_UP = 0.1
# Requests of one simulation; more for a rarer percentile.
REQUESTS = 4000
_MOST = 64
# Of the devices' time: a request never waits then.
_IDLE = 0.02


@dataclass(frozen=True, slots=True)
class Devices:
    """`number` of them behind one queue, and how each forms batches: see `TimeTable`.

    A request that comes while a forward runs makes it `interference` seconds longer.
    """

    cost: CostModel
    limits: Limits
    number: int = 1
    overlapping: bool = False
    interference: float = 0.0
    queue_places: int = QUEUE_PLACES

    def limits_of(self, _: Model) -> Limits:
        """The limits of a forward."""
        return self.limits


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the requests saw: seconds of each answered one, and how many were refused.

    `utilisation` is the devices' busy share of the time, `batches` the tokens of each batch.
    """

    latencies: list[float]
    refused: int
    utilisation: float
    batches: list[int] = field(repr=False)

    def percentile(self, percent: float) -> float:
        """Seconds within which so many per cent were answered, the first tenth left out."""
        warm = self.latencies[int(_WARM_UP * len(self.latencies)) :]
        return float(np.percentile(warm, percent)) if warm else float("inf")


class _SimulatedModel:
    """What the queue and the batcher look at in a model."""

    max_batch_sequences = None


_MODEL: Any = _SimulatedModel()
_DENSE = Outputs(dense=True)


class _Clock:
    """Calls what is due in the order of virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def call_at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.due, (time, next(self._order), call))

    def run(self) -> None:
        while self.due:
            self.now, _, call = heapq.heappop(self.due)
            call()


@dataclass(slots=True, eq=False)
class _Forward:
    """A batch on a device, which will be done at `ends`."""

    batch: Batch
    seconds: float
    ends: float


class _Device:
    """Takes batches as `DeviceExecutor` does: one at a time, or the next one while one is computed.

    A long forward that does not overlap with others lets short jobs in.
    """

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._slots = 2 if simulation.devices.overlapping else 1
        self._free_at = 0.0
        self._running: _Forward | None = None
        self._preempted: _Forward | None = None
        self._preemption: Preemption | None = None
        self.busy_seconds = 0.0

    @property
    def idle(self) -> bool:
        """Whether it waits for a job."""
        return self._slots > 0

    def take(self) -> None:
        """Take batches while it has room for them."""
        simulation = self._simulation
        while self._slots:
            batch = simulation.queue.take(simulation.devices.limits_of)
            if batch is None:
                return
            self._slots -= 1
            self._begin(batch)

    def disturb(self, seconds: float) -> None:
        """Make the forward that runs longer, if one does."""
        if self._running is not None:
            self._delay(self._running, seconds)

    def offer(self, job: Job) -> None:
        """Let a job that has just come preempt the forward that runs, if it is short."""
        if self._preemption is not None:
            self._preemption.offer([job])

    def _begin(self, batch: Batch) -> None:
        seconds = self._simulation.seconds_of(batch)
        if self._simulation.devices.overlapping or seconds <= WORTH_PREEMPTING:
            self._run(batch)
            return
        short, batch = split_short(batch)
        forward = self._run(batch)
        self._preempted = forward
        self._preemption = Preemption(
            batch,
            seconds,
            self._simulation.consumer,
            self._simulation.devices.limits_of,
            lambda short: self._preempt(forward, short),
        )
        if short.slices:
            self._preemption.begin(short)

    def _run(self, batch: Batch) -> _Forward:
        clock = self._simulation.clock
        self._simulation.batches.append(batch.tokens)
        seconds = self._simulation.seconds_of(batch)
        self._free_at = max(clock.now, self._free_at) + seconds
        self.busy_seconds += seconds
        forward = self._running = _Forward(batch, seconds, self._free_at)
        clock.call_at(forward.ends, lambda: self._end(forward))
        return forward

    def _preempt(self, forward: _Forward, short: Batch) -> None:
        """Run `short` within `forward`, which ends later by as much."""
        clock = self._simulation.clock
        seconds = self._simulation.seconds_of(short)
        self._delay(forward, seconds)
        self._simulation.batches.append(short.tokens)
        clock.call_at(clock.now + seconds, lambda: self._end_preempting(forward, short, seconds))

    def _delay(self, forward: _Forward, seconds: float) -> None:
        self.busy_seconds += seconds
        forward.ends += seconds
        self._free_at += seconds

    def _end_preempting(self, forward: _Forward, short: Batch, seconds: float) -> None:
        self._simulation.complete(short, seconds)
        if self._preempted is forward and self._preemption is not None:
            self._preemption.ended(seconds)

    def _end(self, forward: _Forward) -> None:
        clock = self._simulation.clock
        if forward.ends > clock.now:  # Others were let in meanwhile.
            clock.call_at(forward.ends, lambda: self._end(forward))
            return
        if self._preempted is forward:
            self._preempted = self._preemption = None
        if self._running is forward:
            self._running = None
        self._slots += 1
        self._simulation.complete(forward.batch, forward.seconds)
        self.take()


class Simulation:
    """Requests on their way through one queue and its devices."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.clock = _Clock()
        self.queue = JobQueue()
        self.consumer = self.queue.consumer(lambda _: True)
        self.batches: list[int] = []
        self._workers = [_Device(self) for _ in range(devices.number)]
        self._in_work: dict[Job, Arrival] = {}
        self._latencies: dict[int, float] = {}
        self._order: dict[Job, int] = {}
        self._refused = 0
        self._ids: TokenIds = np.zeros(0, np.int64)

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        """Every request until it is answered or refused; ends early where many are refused."""
        requests = list(arrivals)
        self._ids = np.zeros(max(max(each.lengths) for each in requests), np.int64)
        for index, arrival in enumerate(requests):
            tokenized = arrival.time + self.devices.cost.tokenize(arrival.lengths)
            self.clock.call_at(tokenized, partial(self._arrive, arrival, index))
        self.consumer.on_arrival = self._offer
        self.clock.run()
        busy = sum(worker.busy_seconds for worker in self._workers)
        return Outcome(
            [self._latencies[index] for index in sorted(self._latencies)],
            self._refused,
            busy / (self.clock.now * self.devices.number),
            self.batches,
        )

    def seconds_of(self, batch: Batch) -> float:
        """What its forward takes."""
        return self.devices.cost.forward(map(len, batch.sequences))

    def complete(self, batch: Batch, seconds: float) -> None:
        """Give the jobs of a batch their results; those that have all are answered."""
        batch.complete([None] * len(batch.sequences), seconds)
        for each in batch.slices:
            arrival = self._in_work.get(each.job)
            if each.job.resolved and arrival is not None:
                del self._in_work[each.job]
                answered = self.clock.now + self.devices.cost.rest(arrival.lengths)
                self._latencies[self._order.pop(each.job)] = answered - arrival.time

    def _arrive(self, arrival: Arrival, index: int) -> None:
        if len(self.queue.jobs) >= self.devices.queue_places:
            self._refused += 1
            if self._refused == _MOST_REFUSED:
                self.clock.due.clear()
            return
        for worker in self._workers:
            worker.disturb(self.devices.interference)
        sequences = [self._ids[:length] for length in arrival.lengths]
        job = Job(_MODEL, sequences, _DENSE, client=arrival.client)
        self._in_work[job], self._order[job] = arrival, index
        self.queue.put(job)
        for worker in self._workers:
            worker.take()

    def _offer(self, job: Job) -> None:
        """As the queue's consumers do: only where none of them is idle."""
        if not any(worker.idle for worker in self._workers):
            for worker in self._workers:
                worker.offer(job)


@dataclass(frozen=True, slots=True)
class Target:
    """Seconds within which half, and 99 of 100 requests are to be answered; None: any."""

    p50: float | None
    p99: float | None

    def met_by(self, outcome: Outcome) -> bool:
        """Whether nothing was refused and the percentiles are within it."""
        wanted = ((50, self.p50), (99, self.p99))
        return not outcome.refused and all(
            most is None or outcome.percentile(at) <= most for at, most in wanted
        )


@dataclass(frozen=True, slots=True)
class Option:
    """A number of replicas with a number of devices each, and what a simulation of it saw."""

    replicas: int
    devices: int
    outcome: Outcome
    meets: bool


def simulate(load: Load, devices: Devices, seed: int = 0, requests: int = REQUESTS) -> Outcome:
    """What the load sees of the devices."""
    return Simulation(devices).run(load.arrivals(requests, seed))


def options(
    load: Load, devices: Devices, target: Target, requests: int = REQUESTS, *, replicas: bool
) -> list[Option]:
    """More and more devices, until the target is met or more would not help any more.

    Behind one queue, or as `replicas` of one device that share the requests at random.
    """
    tried: list[Option] = []
    for number in range(1, _MOST + 1):
        share = replace(load, rate=load.rate / number) if replicas else load
        behind = devices if replicas else replace(devices, number=number)
        outcome = simulate(share, behind, requests=requests)
        counts = (number, 1) if replicas else (1, number)
        tried.append(Option(*counts, outcome, target.met_by(outcome)))
        if tried[-1].meets or outcome.utilisation < _IDLE:
            break
    return tried
