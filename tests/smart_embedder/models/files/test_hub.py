"""Finding a model on disk or on the hub, downloading it, and the errors.

Most tests run in this process with a hub on loopback; one starts a real server with a .env file.
"""

import hashlib
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import ThreadingHTTPServer
from itertools import count
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from structlog.testing import capture_logs

from smart_embedder.errors import StartupError
from smart_embedder.interface import Download, DownloadStatus, human_size
from smart_embedder.models.files import hub
from smart_embedder.models.files.hub import HubOptions, find_or_download, follow_download
from smart_embedder.models.loader import locate_model, locate_models
from smart_embedder.settings import EngineSettings
from tests.support.answering_http import Handler, serving, url_of
from tests.support.hub import MODEL, run_hub
from tests.support.server import run_server

MIB = 2**20
# The hub's library passes on 10 MiB at a time.
STEP, STOP_AT, LARGE = 10 * MIB, 12 * MIB, 24 * MIB
WRITTEN, SENT = "huggingface_hub.snapshot_download", "huggingface_hub.snapshot_download.transfer"
NOT_REACHED = "the hub cannot be reached. The model example/m3 is not on this machine: fetch it"
TOKEN = "hf_secret"
CACHED = "models--example--m3"


def cached_model(cache: Path, commit: str = "a" * 40, name: str = MODEL) -> Path:
    """Store a model as huggingface_hub does after a download."""
    model = cache / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(commit)
    return snapshot


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Find the model with a hub, and return the log, with every step of a download."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(hub, "_SECONDS_BETWEEN_LINES", 0.0)

    def fetch(address: str) -> list[dict[str, object]]:
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        with capture_logs() as logs:
            found = find_or_download(MODEL, HubOptions(tmp_path, None, offline=False))
        assert found == tmp_path / CACHED / "snapshots" / ("a" * 40)
        return logs

    yield fetch
    huggingface_hub.close_session()


def test_local_folder_is_a_model_whatever_its_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "m3").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = {name: Path(name) for name in ("own/m3", "own", str(tmp_path), "./own")}
    for name, folder in (expected | {"~/own": tmp_path / "own"}).items():
        assert locate_model(name, None, EngineSettings(), DownloadStatus()) == folder


@pytest.mark.parametrize(
    "name",
    ["/no/such", "./none", "~/no/such", "none", "a/b/c"],
)
def test_name_that_is_no_hub_id_is_not_looked_up(name: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"^the model folder {name} does not exist$"):
        find_or_download(name, HubOptions(tmp_path, None, offline=True))


def test_offline_model_is_found_by_revision_or_the_error_says_how_to_fetch_it(
    tmp_path: Path,
) -> None:
    command = "hf download example/m3"
    for revision, named in ((None, command), ("v2", f"{command} --revision v2")):
        with pytest.raises(StartupError) as caught:
            find_or_download(MODEL, HubOptions(tmp_path, revision, offline=True))
        assert str(caught.value) == (
            f"The model {MODEL} is not on this machine: fetch it with `{named}` where the hub can "
            f"be reached, and copy it to {tmp_path} or name its folder in the setting"
        )
        cached_model(tmp_path, ("a" if revision is None else "b") * 40)
    for revision, commit in ((None, "b" * 40), ("a" * 40, "a" * 40)):
        assert find_or_download(MODEL, HubOptions(tmp_path, revision, offline=True)).name == commit


def test_each_model_has_its_own_revision(tmp_path: Path) -> None:
    revisions = {"model_revision": "b", "dense_model_revision": "d", "reranker_model_revision": "e"}
    models = {"embedding_model": "a/b", "dense_embedding_model": "a/d", "reranker_model": "a/e"}
    for letter in revisions.values():
        for commit in (letter, "f"):  # The last one is the newest.
            cached_model(tmp_path / "hub", commit * 40, name=f"a/{letter}")
    for left_out in (None, *revisions):
        named = {name: letter * 40 for name, letter in revisions.items() if name != left_out}
        settings = EngineSettings(hf_home=tmp_path, hf_hub_offline=True, **models, **named)
        found = [folder.name for folder in locate_models(settings)]
        assert found == [named.get(name, "f" * 40) for name in revisions]


def test_revision_without_effect_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "m3").mkdir()
    revisions = {"model_revision": "v1", "dense_model_revision": "v2"}
    more = {"reranker_model": "none", "reranker_model_revision": "v3"}
    with capture_logs() as logs:
        locate_models(EngineSettings(embedding_model=str(tmp_path / "m3"), **revisions, **more))
    assert [(line["event"], line["model"], line["revision"]) for line in logs] == [
        ("revision_not_used", "m3", "v1"),
        ("revision_not_used", "m3", "v2"),
        ("revision_not_used", "none", "v3"),
    ]


@contextmanager
def closed_port() -> Iterator[str]:
    """Reserve a port that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


PAGE = b"<html>Please log in</html>"
INFO = b'{"id": "example/m3", "siblings": [{"rfilename": "config.json"}]}'
# Returns the body for a request, by its number, or None to close the connection.
Respond = Callable[[int, threading.Event], bytes | None]


@contextmanager
def serve(respond: Respond, status: int = 200, **headers: str) -> Iterator[str]:
    """Serve a hub with these responses until the block ends, which sets the event."""
    requests, ended = count(1), threading.Event()

    class Responding(Handler):
        def respond(self) -> None:
            body = respond(next(requests), ended)
            if body is not None:
                with suppress(OSError):  # The client has left.
                    self.answer(status, body, **headers)

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Responding)) as server:
        try:
            yield url_of(server)
        finally:
            ended.set()


UNREACHABLE: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "a captive portal": lambda: serve(lambda *_: PAGE),
    "a response to the first request only": lambda: serve(
        lambda number, ended: INFO if number == 1 else ended.wait(120) and None
    ),
}


@pytest.mark.parametrize("unreachable", UNREACHABLE.values(), ids=UNREACHABLE)
def test_unreachable_hub_is_reported_soon(unreachable, fetch, monkeypatch) -> None:
    assert 2 * hub._HUB_TIMEOUT < 25, "there are two attempts"
    monkeypatch.setattr(hub, "_HUB_TIMEOUT", 0.5)
    with unreachable() as address, pytest.raises(StartupError, match=NOT_REACHED):
        fetch(address)


class RefusingProxy(Handler):
    def respond(self) -> None:
        self.answer(407, b"who are you?")

    do_CONNECT = Handler.do_GET  # noqa: N815 - the library's name


def test_refusing_proxy_is_named_without_its_password(fetch, monkeypatch) -> None:
    huggingface_hub.close_session()
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), RefusingProxy)) as refusing:
        address = url_of(refusing).removeprefix("http://")
        monkeypatch.setenv("HTTP_PROXY", f"http://me:{TOKEN}@{address}/")
        with pytest.raises(StartupError) as caught:
            fetch("http://hub.invalid")
    message = f"the hub cannot be reached through the proxy {address} (407 Proxy Authentication "
    assert str(caught.value).startswith(message)


def test_earlier_download_is_used_without_the_hub(tmp_path: Path, fetch) -> None:
    with closed_port() as address:
        with pytest.raises(StartupError, match=NOT_REACHED):
            fetch(address)
        cached_model(tmp_path)
        assert fetch(address) == []


@pytest.mark.parametrize("proxy", ["socks5://proxy", "http://[::1"])
def test_unusable_proxy_is_reported(monkeypatch, fetch, proxy: str) -> None:
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
def test_errors_of_the_hub_are_explained(code: str, sentence: str, fetch) -> None:
    refusing = serve(lambda *_: b"", 404, X_Error_Code=code)
    with refusing as address, pytest.raises(StartupError) as caught:
        fetch(address)
    assert str(caught.value).startswith(sentence)


def test_download_with_a_wrong_digest_is_removed(tiny_m3: Path, tmp_path: Path, fetch) -> None:
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


def test_unwritable_cache_is_reported(tiny_m3: Path, tmp_path: Path, fetch) -> None:
    (tmp_path / CACHED).touch()
    with run_hub(tiny_m3) as served, pytest.raises(StartupError) as caught:
        fetch(served.address)
    assert str(caught.value).startswith(f"the model {MODEL} cannot be stored in {tmp_path}: ")
    assert str(caught.value).endswith("large enough, or set HF_HOME to another folder")


@pytest.fixture(scope="module")
def model(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose largest file comes in three steps."""
    folder = tmp_path_factory.mktemp("hub") / "m3"
    shutil.copytree(tiny_m3, folder)
    with (folder / "extra.pt").open("wb") as file:
        file.truncate(LARGE)
    return folder


def percents(lines: list[dict[str, object]]) -> list[object]:
    return [line["percent"] for line in lines if line["event"] == "model_download"]


def test_health_shows_the_progress_of_a_download(model: Path, tmp_path: Path) -> None:
    with run_hub(model, stop_at=STOP_AT, token=TOKEN) as served:
        served.flowing.clear()
        proxy = served.address.replace("//", "//user:password@")
        (tmp_path / ".env").write_text(
            f"HF_TOKEN={TOKEN}\nHF_ENDPOINT=http://hub.invalid\nHTTP_PROXY={proxy}\n"
            f"EMBEDDING_MODEL={MODEL}\nHF_HOME={tmp_path}\nHF_HUB_OFFLINE=false\n"
        )
        with run_server(tmp_path, healthy=False, HF_HUB_OFFLINE="") as server:
            server.wait_for_more(
                lambda: (server.get("/health").json()["download"] or {"done": 0})["done"], STEP - 1
            )
            health = server.get("/health").json()
            done, total = health["download"]["done"], sum(served.sizes.values())
            percent = 100 * done // total
            assert STEP <= done < total
            assert health["download"] == {
                "model": MODEL, "done": done, "total": total, "percent": percent,
            }  # fmt: skip
            sizes = f"{human_size(done)} of {human_size(total)} ({percent} %)"
            assert health["reason"] == f"{MODEL} is being downloaded: {sizes}"
            served.flowing.set()
            server.wait_until_healthy()
            assert server.get("/health").json()["download"] is None
        assert served.hosts == {"hub.invalid"}
    assert server.log.count("model_downloaded ") == 1
    assert TOKEN not in server.log
    assert "password" not in server.log


def test_download_skips_and_counts_files_on_disk(model: Path, tmp_path: Path, fetch) -> None:
    """Leftovers of ended downloads are removed."""
    blobs = tmp_path / CACHED / "blobs"
    blobs.mkdir(parents=True)
    old, new = blobs / "extra.pt.1.incomplete", blobs / "extra.pt.2.incomplete"
    for file in (old, new):
        file.touch()
    os.utime(old, (0, 0))
    with run_hub(model) as served:
        first = percents(fetch(served.address))
        assert first[0] == 0
        assert first == sorted(first)
        assert (old.exists(), new.exists()) == (False, True)
        (blobs / "extra.pt").unlink()
        again = percents(fetch(served.address))
        sizes = served.sizes
        present = sum(sizes.values()) - sizes["extra.pt"]
        assert again[0] == 100 * present // sum(sizes.values())
        assert again[-1] == 100
        assert fetch(served.address) == [], "nothing is reported where nothing is missing"


def test_download_takes_weights_in_one_format(model: Path, tmp_path: Path, fetch) -> None:
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


def test_broken_download_is_resumed_and_no_byte_counts_twice(
    model: Path, tmp_path: Path, fetch
) -> None:
    with run_hub(model, stop_at=STOP_AT, cuts=1) as served:
        lines = fetch(served.address)
    assert served.ranges == [f"bytes={STEP}-"]
    assert percents(lines) == sorted(percents(lines))
    assert percents(lines)[-1] == 100
    assert lines[-1]["event"] == "model_downloaded"


def test_downloaded_bytes_count_before_they_are_on_disk(monkeypatch) -> None:
    """A line is logged every five seconds, and at the end."""
    now, status = 1000.0, DownloadStatus()
    monkeypatch.setattr(hub.time, "monotonic", lambda: now)
    with (
        capture_logs() as logs,
        follow_download("m", status, {"a": 100, "b": 900}, {"a"}) as bar,
    ):
        assert status.current == Download("m", 100, 1000)
        for name, size, done in [
            (SENT, 300, 400),
            (WRITTEN, 200, 400),
            (WRITTEN, 200, 500),
            (SENT, 900, 1000),
            (SENT, -1000, 500),
        ]:
            now += 2.5
            bar(name=name).update(size)
            assert status.current == Download("m", done, 1000)
        bar(name="files").update(7)
        assert status.current == Download("m", 500, 1000)
    assert status.current is None
    assert [line.get("percent") for line in logs] == [10, 40, 100, None]
    expected = {"event": "model_downloaded", "model": "m", "total": "0 MB", "seconds": 12}
    assert logs[-1] == expected | {"log_level": "info"}
    with follow_download("m", status, {"a": 1, "b": 2}, {"a", "b"}) as bar:
        assert (bar, status.current) == (None, None), "nothing is missing"
