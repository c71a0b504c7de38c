"""The progress of a download: in the log, and in /health of a real process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from smart_embedder.engine.model import Download, DownloadStatus, human_size
from smart_embedder.models.checkpoint import hub as download
from smart_embedder.models.checkpoint.hub import DownloadProgress, follow_download
from tests.support.hub import MODEL, Hub, run_hub
from tests.support.server import REPOSITORY, RunningServer, run_server

MIB = 2**20
# The hub's library passes on 10 MiB at a time.
STEP, STOP_AT, LARGE = 10 * MIB, 12 * MIB, 24 * MIB
WRITTEN, SENT = "huggingface_hub.snapshot_download", "huggingface_hub.snapshot_download.transfer"
# Logs every step of a download.
LOCATE = """
import sys
from pathlib import Path
from smart_embedder.models.checkpoint import hub
from smart_embedder.observability.logs import configure_logs
configure_logs("json", "info")
hub._SECONDS_BETWEEN_LINES = 0
print(hub.locate("example/m3", hub.Hub(Path(sys.argv[1]), None, offline=False)))
"""


@pytest.fixture(scope="module")
def model(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose largest file comes in three steps."""
    folder = tmp_path_factory.mktemp("hub") / "m3"
    shutil.copytree(tiny_m3, folder)
    with (folder / "extra.pt").open("wb") as file:
        file.truncate(LARGE)
    return folder


def fetch(hub: Hub, cache: Path) -> list[dict[str, object]]:
    """Fetch the model in a process of its own; return what it logged."""
    done = subprocess.run(
        [sys.executable, "-c", LOCATE, str(cache)],
        env={"PYTHONPATH": str(REPOSITORY), "HF_ENDPOINT": hub.address, "HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]


def percents(lines: list[dict[str, object]]) -> list[object]:
    return [line["percent"] for line in lines if line["event"] == "model_download"]


def wait_for_download(server: RunningServer, more_than: int) -> dict[str, object]:
    """What /health says once more bytes than these are there."""

    def done() -> int:
        download = server.get("/health").json()["download"]
        return int(download["done"]) if download else 0

    server.wait_for_more(done, more_than)
    response = server.get("/health")
    assert response.status_code == 503
    health: dict[str, object] = response.json()
    return health


def test_health_and_the_log_tell_how_far_a_download_is(model: Path, tmp_path: Path) -> None:
    with run_hub(model, stop_at=STOP_AT) as hub:
        hub.flowing.clear()
        settings = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        with run_server(tmp_path, EMBEDDING_MODEL=MODEL, **settings) as server:
            health = wait_for_download(server, STEP - 1)
            total = sum(hub.sizes.values())
            download = health["download"]
            assert isinstance(download, dict)
            done = download["done"]
            assert STEP <= done < total
            assert download == {
                "model": MODEL,
                "done": done,
                "total": total,
                "percent": 100 * done // total,
            }
            assert health["status"] == "loading"
            assert health["reason"] == (
                f"{MODEL} is being downloaded: {human_size(done)} of {human_size(total)} "
                f"({download['percent']} %)"
            )
            assert server.get("/health/live").status_code == 200
            hub.flowing.set()
            server.wait_until_healthy()
            assert server.get("/health").json()["download"] is None
    assert server.log.count("model_downloaded ") == 1
    assert "extra.pt" not in server.log
    assert "config.json" not in server.log


def test_what_is_on_the_disk_counts_and_is_not_fetched_again(model: Path, tmp_path: Path) -> None:
    with run_hub(model) as hub:
        first = percents(fetch(hub, tmp_path))
        assert first[0] == 0
        assert first == sorted(first)
        (tmp_path / "models--example--m3" / "blobs" / "extra.pt").unlink()
        again = percents(fetch(hub, tmp_path))
        sizes = hub.sizes
        present = sum(sizes.values()) - sizes["extra.pt"]
        assert again[0] == 100 * present // sum(sizes.values())
        assert again[-1] == 100
        assert fetch(hub, tmp_path) == [], "nothing is reported where nothing is missing"


def test_weights_are_fetched_once_in_one_format_and_projections_in_theirs(
    model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "2_Dense").mkdir()
    for name in ("model.safetensors", "pytorch_model.bin", "2_Dense/pytorch_model.bin"):
        (folder / name).write_bytes(name.encode())
    with run_hub(folder) as hub:
        fetch(hub, tmp_path)
    (fetched,) = (tmp_path / "models--example--m3" / "snapshots").iterdir()
    assert (fetched / "model.safetensors").is_file()
    assert not (fetched / "pytorch_model.bin").exists()
    assert (fetched / "2_Dense" / "pytorch_model.bin").read_bytes() == b"2_Dense/pytorch_model.bin"


def test_what_an_ended_download_left_is_removed_and_one_that_goes_on_is_kept(
    model: Path, tmp_path: Path
) -> None:
    blobs = tmp_path / "models--example--m3" / "blobs"
    blobs.mkdir(parents=True)
    old, new = blobs / "extra.pt.1.incomplete", blobs / "extra.pt.2.incomplete"
    for file in (old, new):
        file.touch()
    os.utime(old, (0, 0))
    with run_hub(model) as hub:
        fetch(hub, tmp_path)
    assert not old.exists()
    assert new.exists()


def test_a_connection_that_breaks_is_resumed_and_no_byte_counts_twice(
    model: Path, tmp_path: Path
) -> None:
    with run_hub(model, stop_at=STOP_AT, cuts=1) as hub:
        lines = fetch(hub, tmp_path)
    assert hub.ranges == [f"bytes={STEP}-"]
    assert percents(lines) == sorted(percents(lines))
    assert percents(lines)[-1] == 100
    assert lines[-1]["event"] == "model_downloaded"


def test_the_log_has_a_line_every_five_seconds_whatever_the_number_of_steps() -> None:
    now = 0.0
    status = DownloadStatus()
    with capture_logs() as logs:
        progress = DownloadProgress("m", status, total=1000, on_disk=0, clock=lambda: now)
        for _ in range(100):
            now += 0.25
            progress.add(WRITTEN, 10)
    assert [line["percent"] for line in logs] == [0, 20, 40, 60, 80, 100]
    assert status.current == Download("m", 1000, 1000)


def test_bytes_that_were_sent_count_before_the_disk_has_them() -> None:
    status = DownloadStatus()
    progress = DownloadProgress("m", status, total=1000, on_disk=100)
    for bar, count, done in [
        (SENT, 300, 400),
        (WRITTEN, 200, 400),
        (WRITTEN, 200, 500),
        (SENT, 900, 1000),
        (SENT, -1000, 500),
    ]:
        progress.add(bar, count)
        assert status.current == Download("m", done, 1000)


def fail_in_a_download(status: DownloadStatus) -> None:
    with follow_download("m", status, {"a": 1, "b": 2}, {"a"}):
        assert status.current == Download("m", 1, 3)
        raise OSError("disk")


def test_a_download_that_fails_is_no_longer_shown() -> None:
    status = DownloadStatus()
    with capture_logs() as logs, pytest.raises(OSError, match="disk"):
        fail_in_a_download(status)
    assert status.current is None
    assert [line["event"] for line in logs] == ["model_download"]


def test_the_end_of_a_download_is_told_with_its_size_and_its_seconds(monkeypatch) -> None:
    now, status = 1000.0, DownloadStatus()
    monkeypatch.setattr(download.time, "monotonic", lambda: now)
    with capture_logs() as logs:
        with follow_download("m", status, {"a": 10**6, "b": 2 * 10**6}, {"a"}) as bar:
            assert bar is not None
            now += 12.4
        with follow_download("m", status, {"a": 1, "b": 2}, {"a", "b"}) as bar:
            assert (bar, status.current) == (None, None)
    end = logs[-1]
    assert [each["event"] for each in logs].count("model_downloaded") == 1
    assert (end["event"], end["model"], end["total"]) == ("model_downloaded", "m", "3 MB")
    assert end["seconds"] == 12
    assert status.current is None


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 MB"), (10**6 - 1, "1 MB"), (999_000_000, "999 MB"), (2_270_000_000, "2.3 GB")],
)
def test_sizes_are_told_for_people(count: int, text: str) -> None:
    assert human_size(count) == text
