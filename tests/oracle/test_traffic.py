"""Under mixed traffic every response equals that of an idle server.

Of 40 requests to a server about 36 are answered, 2 refused as malformed, 2 abandoned, none lost or
wrong. One server has several models, a cache and two workers; its idle server has no cache and one
worker.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.oracle.comparison import TOLERANCES, Comparison
from tests.oracle.configurations import Checkpoints, Configuration, configurations
from tests.oracle.several_models import save_several
from tests.oracle.traffic import Traffic, ask_idle
from tests.support.server import RunningServer, run_server

DISTINCT = 20
SENT = 40
# The other configurations have models of these two; `scripts.oracle` runs all.
NAMES = ["qwen", "several"]


@pytest.fixture(scope="module")
def every_configuration(
    tiny_m3: Path, tiny_reranker: Path, tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory
):
    several = save_several(tmp_path_factory.mktemp("several"))
    found = configurations(Checkpoints(tiny_m3, tiny_reranker, tiny_qwen, several))
    return {name: found[name] for name in NAMES}


@pytest.fixture(scope="module")
def servers(
    every_configuration: dict[str, Configuration], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RunningServer]]:
    """Start all servers at the same time."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("oracle")
        running = {
            name: stack.enter_context(run_server(folder, healthy=False, **settings))
            for name, settings in settings_of(every_configuration)
        }
        for server in running.values():
            server.wait_until_healthy()
        yield running


def settings_of(
    every_configuration: dict[str, Configuration],
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the settings of each server, by its name."""
    for name, configuration in every_configuration.items():
        yield name, configuration.settings | configuration.only_under_load
        if configuration.only_under_load:
            yield f"{name}, idle", configuration.settings


@pytest.mark.parametrize("name", NAMES)
def test_responses_do_not_depend_on_the_traffic(servers, every_configuration, name) -> None:
    cases = every_configuration[name].draw_cases(5, DISTINCT)
    idle = servers.get(f"{name}, idle", servers[name])
    expected = asyncio.run(ask_idle(idle, cases))
    traffic = Traffic(servers[name], cases, expected, Comparison(TOLERANCES["float32"]))
    asyncio.run(traffic.run(iter(range(SENT))))
    found, tally = traffic.comparison, traffic.tally
    assert found.wrong == []
    assert (tally.lost, tally.sent) == (0, SENT)
    assert found.compared > SENT / 2
    assert "Traceback" not in servers[name].log
