"""From a load and a target to devices and replicas."""

from dataclasses import dataclass, replace

from tools.capacity.cost import Load
from tools.capacity.simulation import Devices, Outcome, Simulation

# Requests of one simulation; more for a rarer percentile.
REQUESTS = 4000
_MOST = 64
# Of the devices' time: a request never waits then.
_IDLE = 0.02


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
