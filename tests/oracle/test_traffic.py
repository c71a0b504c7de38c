"""Under mixed traffic every response equals that of an idle server.

Of 40 requests to a server about 36 are answered, 2 refused as malformed, 2 abandoned, none lost or
wrong. The server has several models, a cache and two workers; the idle one has no cache and one
worker. `scripts.oracle` runs other models, too, some of which read pictures.
"""

import asyncio
from pathlib import Path

from tests.oracle.comparison import TOLERANCES, Comparison
from tests.oracle.configurations import Checkpoints, configurations
from tests.oracle.pictures import save_pictures
from tests.oracle.several_models import save_several
from tests.oracle.traffic import Traffic, ask_idle
from tests.support.server import run_server

DISTINCT = 20
SENT = 40


def test_responses_do_not_depend_on_the_traffic(
    tiny_m3: Path, tiny_reranker: Path, tiny_qwen: Path, tmp_path: Path
) -> None:
    several, pictures = save_several(tmp_path / "several"), save_pictures(tmp_path / "pictures")
    checkpoints = Checkpoints(tiny_m3, tiny_reranker, tiny_qwen, several, pictures)
    configuration = configurations(checkpoints)["several"]
    settings, cases = configuration.settings, configuration.draw_cases(5, DISTINCT)
    with (
        run_server(tmp_path, healthy=False, **settings | configuration.only_under_load) as server,
        run_server(tmp_path, **settings) as idle,
    ):
        server.wait_until_healthy()
        expected = asyncio.run(ask_idle(idle, cases))
        comparison = Comparison(TOLERANCES["float32"])
        traffic = Traffic(server, cases, expected, configuration.malformed, comparison)
        asyncio.run(traffic.run(iter(range(SENT))))
        assert "Traceback" not in server.log
    found, tally = traffic.comparison, traffic.tally
    assert found.wrong == []
    assert (tally.lost, tally.sent) == (0, SENT)
    assert found.compared > SENT / 2
