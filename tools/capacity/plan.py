"""From a load and a target to devices and replicas."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from smart_embedder.engine.scheduling.batcher import Limits
from tools.capacity.cost import Load, TimeTable, fit
from tools.capacity.simulation import QUEUE_PLACES, Devices, Outcome, Simulation

# Requests of one simulation; more for a rarer percentile.
REQUESTS = 4000
_MOST = 64


@dataclass(frozen=True, slots=True)
class Target:
    """Seconds within which half, and 99 of 100 requests are to be answered; None: any."""

    p50: float | None
    p99: float | None

    def met_by(self, outcome: Outcome) -> bool:
        """Whether nothing was refused and the percentiles are within it."""
        if outcome.refused:
            return False
        wanted = ((50, self.p50), (99, self.p99))
        return all(most is None or outcome.percentile(at) <= most for at, most in wanted)


@dataclass(frozen=True, slots=True)
class Option:
    """A number of replicas with a number of devices each, and what a simulation of it saw."""

    replicas: int
    devices: int
    outcome: Outcome
    meets: bool


def devices_of(table: TimeTable, queue_places: int = QUEUE_PLACES) -> Devices:
    """One device with the times that were measured; raises `PlanError`."""
    return Devices(
        fit(table),
        Limits(table.max_batch_tokens),
        overlapping=table.overlapping,
        interference=table.interference,
        queue_places=queue_places,
    )


def simulate(load: Load, devices: Devices, seed: int = 0, requests: int = REQUESTS) -> Outcome:
    """What the load sees of the devices."""
    return Simulation(devices).run(load.arrivals(requests, seed))


def more_devices(
    load: Load, devices: Devices, target: Target, requests: int = REQUESTS
) -> list[Option]:
    """One process with more and more devices behind its queue, until the target is met."""

    def seen(number: int) -> Outcome:
        return simulate(load, replace(devices, number=number), requests=requests)

    return list(_until_met(target, ((1, number, seen(number)) for number in range(1, _MOST + 1))))


def more_replicas(
    load: Load, devices: Devices, target: Target, requests: int = REQUESTS
) -> list[Option]:
    """More and more processes of one device, with the requests shared among them at random."""

    def seen(number: int) -> Outcome:
        return simulate(replace(load, rate=load.rate / number), devices, requests=requests)

    return list(_until_met(target, ((number, 1, seen(number)) for number in range(1, _MOST + 1))))


def _until_met(target: Target, tried: Iterable[tuple[int, int, Outcome]]) -> Iterator[Option]:
    """One after the other, until one meets the target or more would not help any more."""
    for replicas, devices, outcome in tried:
        yield (last := Option(replicas, devices, outcome, target.met_by(outcome)))
        # A request never waits then.
        if last.meets or outcome.utilisation < 0.02:  # noqa: PLR2004
            return
