"""The auditor is tested itself: by faults that are planted in the engine.

`python -m scripts.simulate --faults` plants all of them and says which law finds each.
"""

import subprocess

import pytest

from scripts.simulate import FAULTS, ROOT, look_for
from tests.simulation.auditor import LAWS

PATCHES = sorted(FAULTS.glob("*.patch"))


def test_every_fault_can_be_planted() -> None:
    assert len(PATCHES) >= 20
    for patch in PATCHES:
        subprocess.run(["git", "apply", "--check", "-C1", str(patch)], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", ["lost-wake-up", "half-loses-one", "one-slice-too-many"])
def test_a_planted_fault_is_found(name: str) -> None:
    found = look_for(FAULTS / f"{name}.patch", steps=50_000)
    assert found.get("law") in LAWS, found
