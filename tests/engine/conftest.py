"""A clock for the tests of this room."""

import time

import pytest


class Ticking:
    """A clock that a test moves."""

    time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    """What measures seconds has its time."""
    made = Ticking()
    monkeypatch.setattr(time, "perf_counter", made)
    return made
