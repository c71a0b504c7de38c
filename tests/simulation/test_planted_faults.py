"""Test the auditor with faults that are planted in the engine.

`python -m scripts.simulate --faults` plants all of them and prints the law that finds each.
"""

import pytest

from scripts.simulate import FAULTS, look_for, with_fault
from tests.simulation.auditor import LAWS


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_can_be_planted(name: str) -> None:
    compile(with_fault(name), name, "exec")


@pytest.mark.long
@pytest.mark.parametrize("name", ["lost-wake-up", "half-loses-one", "one-slice-too-many"])
def test_a_planted_fault_is_found(name: str) -> None:
    found = look_for(name, steps=50_000)
    assert found.get("law") in LAWS, found
