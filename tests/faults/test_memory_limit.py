"""A control group that limits the memory: the start says what is missing, or ends."""

from pathlib import Path

from tests.faults.tally import GOOD
from tests.support.server import run_server, start_process


def test_a_start_that_the_memory_has_no_room_for_ends_with_one_sentence(
    tiny_m3: Path, tmp_path: Path
) -> None:
    limit = tmp_path / "limit"
    limit.write_text(str(2**20))
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "LIMIT": str(limit), "PORT": "0"}
    process = start_process(tmp_path, "tests.faults.limited_server", **settings)
    assert process.stdout is not None
    with process.stdout as stream:
        last = stream.read().splitlines()[-1]
    assert (process.wait(60), "start_failed" in last) == (1, True), last
    assert "the memory has no room for the models" in last


def test_a_small_memory_is_said_and_what_fits_it_is_answered(tiny_m3: Path, tmp_path: Path) -> None:
    limit = tmp_path / "limit"
    limit.write_text(str(10**9))
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "LIMIT": str(limit)}
    with run_server(tmp_path, "tests.faults.limited_server", **settings) as server:
        (line,) = [line for line in server.lines if "memory_short" in line]
        assert "missing=" in line
        with server.client() as client:
            assert client.post("/embeddings/", json=GOOD).status_code == 200
            assert (
                client.post("/embeddings/", json={"sentences": ["a" * 20_000_000]}).status_code
                == 413
            )
