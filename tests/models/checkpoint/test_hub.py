"""Finding a model on the disk or on the hub, its download, and what is said where that fails.

No hub that cannot be reached is waited for longer than half a minute. Most runs in this process,
against a hub on loopback; what the system or .env decides is shown by real starts.
"""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import astuple
from http.server import ThreadingHTTPServer
from itertools import count
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from structlog.testing import capture_logs

from smart_embedder.engine.model import Download, DownloadStatus, human_size
from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint import hub
from smart_embedder.models.checkpoint.hub import Hub, follow_download, locate
from smart_embedder.models.loader import ModelFolders, locate_model, locate_models
from smart_embedder.settings import Settings
from tests.support.answering_http import Handler, serving, url_of
from tests.support.bad_start import failing_start
from tests.support.disks import full, give_up_rights, read_only
from tests.support.hub import MODEL, run_hub
from tests.support.server import REPOSITORY, run_server

MIB = 2**20
# The hub's library passes on 10 MiB at a time.
STEP, STOP_AT, LARGE = 10 * MIB, 12 * MIB, 24 * MIB
WRITTEN, SENT = "huggingface_hub.snapshot_download", "huggingface_hub.snapshot_download.transfer"
NOT_REACHED = "the hub cannot be reached. The model example/m3 is not on this machine: fetch it"
TOKEN = "hf_secret"
CACHED = "models--example--m3"
Address = Callable[[], AbstractContextManager[str]]


def offline(cache: Path, revision: str | None = None) -> Hub:
    return Hub(cache=cache, revision=revision, offline=True)


def cached_model(cache: Path, commit: str = "a" * 40, name: str = MODEL) -> Path:
    """A model as huggingface_hub stores it after a download."""
    model = cache / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(commit)
    return snapshot


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Finds the model with a hub, and returns what was logged, every step of a download."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_SECONDS_BETWEEN_TRIES", 0.0)
    monkeypatch.setattr(hub, "_SECONDS_BETWEEN_LINES", 0.0)

    def fetch(address: str) -> list[dict[str, object]]:
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        with capture_logs() as logs:
            found = locate(MODEL, Hub(tmp_path, None, offline=False))
        assert found == tmp_path / CACHED / "snapshots" / ("a" * 40)
        return logs

    yield fetch
    huggingface_hub.close_session()


def test_a_folder_is_a_model_whatever_its_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "m3").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = {name: Path(name) for name in ("own/m3", "own", str(tmp_path), "./own")}
    for name, folder in (expected | {"~/own": tmp_path / "own"}).items():
        assert locate_model(name, None, Settings(), DownloadStatus()) == folder


@pytest.mark.parametrize(
    "name",
    ["/no/such", "/none", "./none", "../no/such", "~/no/such", "~no-one/such", "none", "a/b/c"],
)
def test_what_can_be_no_id_is_not_sought_on_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"^the model folder {name} does not exist$"):
        locate(name, offline(tmp_path))


def test_a_hub_id_is_found_in_the_cache_by_its_revision(tmp_path: Path) -> None:
    other, newest = (cached_model(tmp_path, commit * 40) for commit in "ab")
    assert locate(MODEL, offline(tmp_path)) == newest
    assert locate(MODEL, offline(tmp_path, "a" * 40)) == other


@pytest.mark.parametrize(
    ("revision", "command"),
    [(None, "`hf download example/m3` "), ("v2", "`hf download example/m3 --revision v2` ")],
)
def test_offline_it_is_told_how_to_fetch_a_model_and_where_to_put_it(
    revision: str | None, command: str, tmp_path: Path
) -> None:
    if revision:
        cached_model(tmp_path)
    with pytest.raises(StartupError) as caught:
        locate(MODEL, offline(tmp_path, revision))
    assert str(caught.value) == (
        f"The model {MODEL} is not on this machine: fetch it with {command}where the hub can be "
        f"reached, and copy it to {tmp_path} or name its folder in the setting"
    )


def test_each_model_has_a_revision_of_its_own(tmp_path: Path) -> None:
    folders = {x: cached_model(tmp_path / "hub", x * 40, name=f"a/{x}") for x in "bde"}
    others = {x: cached_model(tmp_path / "hub", "f" * 40, name=f"a/{x}") for x in "bde"}
    models = {"embedding_model": "a/b", "dense_embedding_model": "a/d", "reranker_model": "a/e"}
    common = {"hf_home": tmp_path, "hf_hub_offline": True, **models}
    mine = {
        "model_revision": "b" * 40,
        "dense_model_revision": "d" * 40,
        "reranker_model_revision": "e" * 40,
    }
    assert locate_models(Settings(**common, **mine)) == ModelFolders(*folders.values())
    # Without one it is the newest, which was fetched last.
    for place, setting in enumerate(mine):
        rest = {name: revision for name, revision in mine.items() if name != setting}
        found = astuple(locate_models(Settings(**common, **rest)))
        expected = [*folders.values()]
        expected[place] = [*others.values()][place]
        assert found == tuple(expected)


def test_a_revision_that_has_no_effect_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "m3").mkdir()
    revisions = {"model_revision": "v1", "dense_model_revision": "v2"}
    more = {"reranker_model": "none", "reranker_model_revision": "v3"}
    with capture_logs() as logs:
        locate_models(Settings(embedding_model=str(tmp_path / "m3"), **revisions, **more))
    assert [(line["event"], line["model"], line["revision"]) for line in logs] == [
        ("revision_not_used", "m3", "v1"),
        ("revision_not_used", "m3", "v2"),
        ("revision_not_used", "none", "v3"),
    ]


@contextmanager
def closed_port() -> Iterator[str]:
    """Whoever connects is refused, and nobody else gets the port meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def silent_listener() -> Iterator[str]:
    """Whoever connects is never answered."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


@contextmanager
def no_route() -> Iterator[str]:
    """An address that is kept for documentation, where nobody is."""
    yield "http://203.0.113.7"


@contextmanager
def no_such_name() -> Iterator[str]:
    yield "http://hub.invalid"


PAGE = b"<html>Please log in</html>"
INFO = b'{"id": "example/m3", "siblings": [{"rfilename": "config.json"}]}'
# Of each question, by its number: what is answered, or None where the connection is ended.
Respond = Callable[[int, threading.Event], bytes | None]


@contextmanager
def serve(respond: Respond, status: int = 200, **headers: str) -> Iterator[str]:
    """A hub that answers so until the block ends, when the event is set."""
    asked, ended = count(1), threading.Event()

    class Responding(Handler):
        def respond(self) -> None:
            body = respond(next(asked), ended)
            if body is not None:
                with suppress(OSError):  # Nobody waited.
                    self.answer(status, body, **headers)

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Responding)) as server:
        try:
            yield url_of(server)
        finally:
            ended.set()


def portal() -> AbstractContextManager[str]:
    """Answers everything with a page to log in, as networks for guests do."""
    return serve(lambda *_: PAGE)


def stalling() -> AbstractContextManager[str]:
    """Answers the first question, and no other until the test ends."""
    return serve(lambda asked, ended: INFO if asked == 1 or ended.wait(120) else None)


HUBS = (closed_port, silent_listener, no_route, no_such_name, portal, stalling)


@pytest.mark.parametrize("unreachable", HUBS)
def test_a_hub_that_cannot_be_reached_is_told_soon(unreachable, fetch, monkeypatch) -> None:
    assert 2 * hub._SECONDS_FOR_THE_HUB < 25, "it is asked twice"
    monkeypatch.setattr(hub, "_SECONDS_FOR_THE_HUB", 0.5)
    with unreachable() as address, pytest.raises(StartupError, match=NOT_REACHED):
        fetch(address)


def test_a_hub_that_cannot_be_reached_stops_the_start(tmp_path: Path) -> None:
    with closed_port() as address:
        settings = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        failing_start(tmp_path, Path(MODEL), NOT_REACHED, **settings)


def test_a_model_from_an_earlier_download_is_served_without_the_hub(tmp_path: Path, fetch) -> None:
    with closed_port() as address:
        with pytest.raises(StartupError, match=NOT_REACHED):
            fetch(address)
        cached_model(tmp_path)
        assert fetch(address) == []


def test_a_connection_that_breaks_is_tried_once_more(monkeypatch, tmp_path: Path, fetch) -> None:
    asked = []

    def forget_the_first(number: int, _: threading.Event) -> bytes | None:
        asked.append(number)
        return INFO if number > 1 else None

    with serve(forget_the_first) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        info = hub._ask_hub(MODEL, Hub(tmp_path, None, offline=False))
    assert (info.id, asked) == (MODEL, [1, 2])


@pytest.mark.parametrize("proxy", ["socks5://proxy", "ftp://proxy", "http://[::1"])
def test_a_proxy_that_cannot_be_used_is_told(monkeypatch, fetch, proxy: str) -> None:
    huggingface_hub.close_session()
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(StartupError, match="proxy of HTTPS_PROXY, .* cannot be used: its address"):
        fetch("http://hub.invalid")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("GatedRepo", "the model example/m3 is gated: accept its terms on the hub, and set HF_TOK"),
        ("RevisionNotFound", "the model example/m3 has no revision None"),
        ("RepoNotFound", "there is no model example/m3 on the hub or on disk; a private one needs"),
    ],
)
def test_what_the_hub_refuses_is_told(code: str, sentence: str, fetch) -> None:
    refusing = serve(lambda *_: b"", 404, X_Error_Code=code)
    with refusing as address, pytest.raises(StartupError) as caught:
        fetch(address)
    assert str(caught.value).startswith(sentence)


def test_a_gated_model_is_fetched_with_the_token_and_the_proxy_of_dotenv(
    tiny_m3: Path, tmp_path: Path
) -> None:
    with run_hub(tiny_m3, token=TOKEN) as served:
        proxy = served.address.replace("//", "//user:password@")
        (tmp_path / ".env").write_text(
            f"HF_TOKEN={TOKEN}\nHF_ENDPOINT=http://hub.invalid\nHTTP_PROXY={proxy}\n"
            f"EMBEDDING_MODEL={MODEL}\nHF_HOME={tmp_path}\nHF_HUB_OFFLINE=false\n"
        )
        with run_server(tmp_path, HF_HUB_OFFLINE="") as server:
            server.wait_until_healthy()
        assert served.hosts == {"hub.invalid"}
    assert "model_downloaded" in server.log
    assert TOKEN not in server.log
    assert "password" not in server.log


def test_a_file_that_is_not_what_the_hub_has_announced_is_no_download(
    tiny_m3: Path, tmp_path: Path, fetch
) -> None:
    model = shutil.copytree(tiny_m3, tmp_path / "model")
    config, weights = model / "config.json", model / "model.safetensors"
    content = config.read_bytes()
    git = hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False)
    with run_hub(model) as served:
        served.tags = {
            config.name: git.hexdigest(),
            weights.name: hashlib.sha256(weights.read_bytes()).hexdigest(),
        }
        for wrong in (config, weights):
            right = wrong.read_bytes()
            wrong.write_bytes(right[:-1] + b" ")
            with pytest.raises(StartupError, match=f"{wrong.name} of .* did not arrive as the hub"):
                fetch(served.address)
            wrong.write_bytes(right)
            assert percents(fetch(served.address))[-1] == 100
            shutil.rmtree(tmp_path / CACHED)


def test_a_file_in_the_way_of_the_cache_is_told(tiny_m3: Path, tmp_path: Path, fetch) -> None:
    (tmp_path / CACHED).touch()
    with run_hub(tiny_m3) as served, pytest.raises(StartupError) as caught:
        fetch(served.address)
    assert str(caught.value).startswith(f"the model {MODEL} cannot be stored in {tmp_path}: ")
    assert str(caught.value).endswith("large enough, or set HF_HOME to another folder")


# Under what a disk does, an interpreter of its own; without PyTorch, which it would import for 2 s.
LOCATE = """
import sys
from pathlib import Path
from smart_embedder.models.checkpoint.hub import Hub, locate
locate(sys.argv[1], Hub(Path(sys.argv[2]), None, offline=False))
"""


@pytest.mark.parametrize(
    ("wrap", "reason"),
    [
        (read_only, "Read-only file system"),
        (full, "No space left on device"),
        # As a volume is that was made for the superuser, where the container runs as user 1000.
        (give_up_rights, "Permission denied"),
    ],
)
def test_a_cache_that_cannot_be_written_is_told(wrap, reason: str, tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    for folder in (model, cache):
        folder.mkdir()
    (model / "config.json").write_text("{}")
    prefix = wrap(cache)
    with run_hub(model) as served:
        environment = {"PYTHONPATH": str(REPOSITORY), "HF_ENDPOINT": served.address}
        told = subprocess.run(
            [*prefix, sys.executable, "-c", LOCATE, MODEL, str(cache / "hub")],
            env=environment | {"PATH": os.environ["PATH"], "HF_HOME": str(cache)},
            capture_output=True, text=True, timeout=120, check=False,
        ).stderr.splitlines()  # fmt: skip
    assert f"StartupError: the model example/m3 cannot be stored in {cache / 'hub'}: " in told[-1]
    assert reason in told[-1]


@pytest.fixture(scope="module")
def model(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose largest file comes in three steps."""
    folder = tmp_path_factory.mktemp("hub") / "m3"
    # Without what servers keep beside its files, which is on no hub.
    shutil.copytree(tiny_m3, folder, ignore=shutil.ignore_patterns(".smart-embedder"))
    with (folder / "extra.pt").open("wb") as file:
        file.truncate(LARGE)
    return folder


def percents(lines: list[dict[str, object]]) -> list[object]:
    return [line["percent"] for line in lines if line["event"] == "model_download"]


def test_health_and_the_log_tell_how_far_a_download_is(model: Path, tmp_path: Path) -> None:
    with run_hub(model, stop_at=STOP_AT) as served:
        served.flowing.clear()
        settings = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": served.address, "HF_HUB_OFFLINE": "0"}
        with run_server(tmp_path, EMBEDDING_MODEL=MODEL, **settings) as server:
            server.wait_for_more(
                lambda: (server.get("/health").json()["download"] or {"done": 0})["done"], STEP - 1
            )
            response = server.get("/health")
            assert response.status_code == 503
            health = response.json()
            total = sum(served.sizes.values())
            done = health["download"]["done"]
            percent = 100 * done // total
            assert STEP <= done < total
            assert health["download"] == {
                "model": MODEL, "done": done, "total": total, "percent": percent,
            }  # fmt: skip
            assert health["status"] == "loading"
            sizes = f"{human_size(done)} of {human_size(total)} ({percent} %)"
            assert health["reason"] == f"{MODEL} is being downloaded: {sizes}"
            assert server.get("/health/live").status_code == 200
            served.flowing.set()
            server.wait_until_healthy()
            assert server.get("/health").json()["download"] is None
    assert server.log.count("model_downloaded ") == 1
    assert "extra.pt" not in server.log
    assert "config.json" not in server.log


def test_what_is_on_the_disk_counts_and_is_not_fetched_again(
    model: Path, tmp_path: Path, fetch
) -> None:
    with run_hub(model) as served:
        first = percents(fetch(served.address))
        assert first[0] == 0
        assert first == sorted(first)
        (tmp_path / CACHED / "blobs" / "extra.pt").unlink()
        again = percents(fetch(served.address))
        sizes = served.sizes
        present = sum(sizes.values()) - sizes["extra.pt"]
        assert again[0] == 100 * present // sum(sizes.values())
        assert again[-1] == 100
        assert fetch(served.address) == [], "nothing is reported where nothing is missing"


def test_weights_are_fetched_once_in_one_format_and_projections_in_theirs(
    model: Path, tmp_path: Path, fetch
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "2_Dense").mkdir()
    for name in ("model.safetensors", "pytorch_model.bin", "2_Dense/pytorch_model.bin"):
        (folder / name).write_bytes(name.encode())
    with run_hub(folder) as served:
        fetch(served.address)
    (fetched,) = (tmp_path / CACHED / "snapshots").iterdir()
    assert (fetched / "model.safetensors").is_file()
    assert not (fetched / "pytorch_model.bin").exists()
    assert (fetched / "2_Dense" / "pytorch_model.bin").read_bytes() == b"2_Dense/pytorch_model.bin"


def test_what_an_ended_download_left_is_removed_and_one_that_goes_on_is_kept(
    model: Path, tmp_path: Path, fetch
) -> None:
    blobs = tmp_path / CACHED / "blobs"
    blobs.mkdir(parents=True)
    old, new = blobs / "extra.pt.1.incomplete", blobs / "extra.pt.2.incomplete"
    for file in (old, new):
        file.touch()
    os.utime(old, (0, 0))
    with run_hub(model) as served:
        fetch(served.address)
    assert not old.exists()
    assert new.exists()


def test_a_connection_that_breaks_is_resumed_and_no_byte_counts_twice(
    model: Path, tmp_path: Path, fetch
) -> None:
    with run_hub(model, stop_at=STOP_AT, cuts=1) as served:
        lines = fetch(served.address)
    assert served.ranges == [f"bytes={STEP}-"]
    assert percents(lines) == sorted(percents(lines))
    assert percents(lines)[-1] == 100
    assert lines[-1]["event"] == "model_downloaded"


def test_the_log_has_a_line_every_five_seconds_whatever_the_number_of_steps(monkeypatch) -> None:
    now, status = 1000.0, DownloadStatus()
    monkeypatch.setattr(hub.time, "monotonic", lambda: now)
    with capture_logs() as logs, follow_download("m", status, {"a": 1000}, set()) as bar:
        for _ in range(100):
            now += 0.25
            bar(name=WRITTEN).update(10)
        assert status.current == Download("m", 1000, 1000)
        bar(name="files").update(7)
    assert [line.get("percent") for line in logs] == [0, 20, 40, 60, 80, 100, None]


def test_bytes_that_were_sent_count_before_the_disk_has_them() -> None:
    status = DownloadStatus()
    with follow_download("m", status, {"a": 100, "b": 900}, {"a"}) as bar:
        for name, size, done in [
            (SENT, 300, 400),
            (WRITTEN, 200, 400),
            (WRITTEN, 200, 500),
            (SENT, 900, 1000),
            (SENT, -1000, 500),
        ]:
            bar(name=name).update(size)
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
    monkeypatch.setattr(hub.time, "monotonic", lambda: now)
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
