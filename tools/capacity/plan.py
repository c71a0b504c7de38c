"""From a load and a target to devices and replicas."""

from dataclasses import dataclass, replace

from smart_embedder.engine.scheduling.batcher import Limits
from tools.capacity.cost import TimeTable, fit
from tools.capacity.load import Load
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
    """One device with the times that were measured; raises `TimesError`."""
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
    options: list[Option] = []
    for number in range(1, _MOST + 1):
        outcome = simulate(load, replace(devices, number=number), requests=requests)
        options.append(Option(1, number, outcome, target.met_by(outcome)))
        if _enough(options, target):
            break
    return options


def more_replicas(
    load: Load, devices: Devices, target: Target, requests: int = REQUESTS
) -> list[Option]:
    """More and more processes of one device, with the requests shared among them at random."""
    options: list[Option] = []
    for number in range(1, _MOST + 1):
        outcome = simulate(replace(load, rate=load.rate / number), devices, requests=requests)
        options.append(Option(number, 1, outcome, target.met_by(outcome)))
        if _enough(options, target):
            break
    return options


def _enough(options: list[Option], target: Target) -> bool:
    """Whether the last one meets the target, or more would not help any more."""
    last = options[-1]
    idle = last.outcome.utilisation < 0.02  # noqa: PLR2004 - then a request never waits
    return last.meets or (idle and not target.met_by(last.outcome))
