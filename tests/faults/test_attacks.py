"""Attacks on a server process: their statuses, and the memory that they take.

`python -m scripts.attacks` runs all attacks, and prints how long another client waits.
"""

import sys
from collections.abc import Iterator

import pytest

from tests.faults.attacks import LONG, Attack, attacks, observe, save_model
from tests.faults.tally import EMBED
from tests.support.server import RunningServer, run_server

# The attacks that only a whole process shows; tests/app has those on one limit.
NAMES = {"64 bodies of 16 MiB", "60 unread answers", "millions of ints", "pooled ColBERT"}
ATTACKS = [attack for attack in attacks() if attack.name in NAMES]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run a server with the default limits, which has embedded a text of full length."""
    folder = tmp_path_factory.mktemp("server")
    with run_server(folder, EMBEDDING_MODEL=str(save_model(folder / "model"))) as running:
        with running.client() as client:
            for body in (EMBED[1], {"sentences": [LONG], "return_colbert": False}):
                assert client.post("/embeddings/", json=body).status_code == 200
        yield running


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack(server: RunningServer, attack: Attack) -> None:
    seen = observe(server, attack)
    assert attack.allows(seen), seen
    with server.client() as client:
        assert client.post(EMBED[0], json=EMBED[1]).status_code == 200
    assert "Traceback" not in server.log
