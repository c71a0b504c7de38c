"""Starting where the hub cannot be reached, or its cache not be written.

None of these is waited for longer than half a minute, and each is told in one sentence.
"""

import hashlib
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from smart_embedder.models.checkpoint import hub
from tests.support.bad_start import failing_start
from tests.support.disks import full, give_up_rights, read_only
from tests.support.hub import run_hub
from tests.support.server import run_server

MODEL = Path("example/m3")
Hub = Callable[[], AbstractContextManager[str]]
NOT_REACHED = "the hub cannot be reached. The model example/m3 is not on this machine: fetch it"


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


class Portal(BaseHTTPRequestHandler):
    """Answers everything with a page to log in, as networks for guests do."""

    def do_GET(self) -> None:
        self.answer(b"<html>Please log in</html>")

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep silent."""


class Stalling(Portal):
    """Answers the first question, and no other until the test ends."""

    ended: threading.Event
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        if self.asked > 1:
            self.ended.wait(120)
        self.answer(b'{"id": "example/m3", "siblings": [{"rfilename": "config.json"}]}')

    def answer(self, body: bytes) -> None:
        with suppress(OSError):  # Nobody waited.
            super().answer(body)


@contextmanager
def serve(handler: type[Portal], ended: threading.Event) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            ended.set()
            server.shutdown()
            thread.join(30)


def portal() -> AbstractContextManager[str]:
    return serve(Portal, threading.Event())


def stalling() -> AbstractContextManager[str]:
    ended = threading.Event()
    return serve(type("Fresh", (Stalling,), {"ended": ended}), ended)


HUBS = (closed_port, silent_listener, no_route, no_such_name, portal, stalling)


@pytest.fixture(scope="module", autouse=True)
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Hub, Future[str]]]:
    """A start with each hub, all at once and beside the other tests, since they mostly wait."""
    with ThreadPoolExecutor(len(HUBS)) as pool:
        yield {hub: pool.submit(start_with, hub, tmp_path_factory.mktemp("hub")) for hub in HUBS}


def start_with(hub: Hub, folder: Path) -> str:
    with hub() as address:
        return failing_start(
            folder,
            MODEL,
            NOT_REACHED,
            HF_HOME=str(folder),
            HF_ENDPOINT=address,
            HF_HUB_OFFLINE="0",
        )


def test_a_model_from_an_earlier_download_is_served_without_the_hub(
    tiny_m3: Path, tmp_path: Path
) -> None:
    model = tmp_path / "hub" / "models--example--m3"
    shutil.copytree(tiny_m3, model / "snapshots" / ("a" * 40))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    settings = {"EMBEDDING_MODEL": str(MODEL), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    with (
        closed_port() as address,
        run_server(tmp_path, HF_ENDPOINT=address, **settings) as server,
    ):
        server.wait_until_healthy()


class Forgetful(Portal):
    """Ends the first connection without an answer."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        if self.asked > 1:
            self.answer(b'{"id": "example/m3", "siblings": []}')


def test_a_connection_that_breaks_is_tried_once_more(monkeypatch, tmp_path: Path) -> None:
    handler = type("Fresh", (Forgetful,), {})
    with serve(handler, threading.Event()) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "_SECONDS_BETWEEN_TRIES", 0.0)
        info = hub._ask_hub(str(MODEL), hub.Hub(tmp_path, None, offline=False))
    assert (info.id, handler.asked) == (str(MODEL), 2)


TOKEN = "hf_secret"


def test_a_gated_model_is_fetched_with_the_token_and_the_proxy_of_dotenv(
    tiny_m3: Path, tmp_path: Path
) -> None:
    with run_hub(tiny_m3, token=TOKEN) as hub:
        proxy = hub.address.replace("//", "//user:password@")
        (tmp_path / ".env").write_text(
            f"HF_TOKEN={TOKEN}\nHF_ENDPOINT=http://hub.invalid\nHTTP_PROXY={proxy}\n"
            f"EMBEDDING_MODEL={MODEL}\nHF_HOME={tmp_path}\nHF_HUB_OFFLINE=false\n"
        )
        with run_server(tmp_path, HF_HUB_OFFLINE="", fresh=True) as server:
            server.wait_until_healthy()
        assert hub.hosts == {"hub.invalid"}
    assert "model_downloaded" in server.log
    assert TOKEN not in server.log
    assert "password" not in server.log


def test_a_file_that_is_not_what_the_hub_has_announced_is_no_download(
    tiny_m3: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_m3, tmp_path / "model")
    config, weights = model / "config.json", model / "model.safetensors"
    content = config.read_bytes()
    git = hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False)
    with run_hub(model) as hub:
        hub.tags = {
            config.name: git.hexdigest(),
            weights.name: hashlib.sha256(weights.read_bytes()).hexdigest(),
        }
        settings = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": ""}
        for wrong in (config, weights):
            settings["HF_HOME"] = str(tmp_path / wrong.stem)
            right = wrong.read_bytes()
            wrong.write_bytes(right[:-1] + b" ")
            sentence = f"{wrong.name} of the model {MODEL} did not arrive as the hub has it"
            failing_start(tmp_path, MODEL, sentence, fresh=True, **settings)
            wrong.write_bytes(right)
        settings["EMBEDDING_MODEL"] = str(MODEL)
        with run_server(tmp_path, fresh=True, **settings) as server:
            server.wait_until_healthy()


def test_a_gated_model_without_a_token_says_which_setting_it_needs(
    tiny_m3: Path, tmp_path: Path
) -> None:
    with run_hub(tiny_m3, token=TOKEN) as hub:
        failing_start(
            tmp_path,
            MODEL,
            "the model example/m3 is gated: accept its terms on the hub, and set HF_TOKEN",
            HF_HOME=str(tmp_path),
            HF_ENDPOINT=hub.address,
            HF_HUB_OFFLINE="0",
        )


@pytest.mark.parametrize("proxy", ["socks5://proxy", "ftp://proxy", "http://[::1"])
def test_a_proxy_that_cannot_be_used_stops_the_start(tmp_path: Path, proxy: str) -> None:
    failing_start(
        tmp_path,
        MODEL,
        "the proxy of HTTPS_PROXY, HTTP_PROXY or ALL_PROXY cannot be used",
        HF_HOME=str(tmp_path),
        HTTPS_PROXY=proxy,
        HF_HUB_OFFLINE="0",
    )


def cannot_be_stored(tmp_path: Path, cache: Path, prefix: list[str]) -> str:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with run_hub(model) as hub:
        return failing_start(
            tmp_path,
            MODEL,
            f"the model example/m3 cannot be stored in {cache / 'hub'}: ",
            prefix,
            HF_HOME=str(cache),
            HF_ENDPOINT=hub.address,
            HF_HUB_OFFLINE="0",
        )


def test_a_file_in_the_way_of_the_cache_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "hub").touch()
    cannot_be_stored(tmp_path, tmp_path, [])


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


def test_a_read_only_cache_stops_the_start(tmp_path: Path, cache: Path) -> None:
    assert "Read-only file system" in cannot_be_stored(tmp_path, cache, read_only(cache))


def test_a_full_disk_stops_the_start(tmp_path: Path, cache: Path) -> None:
    assert "No space left on device" in cannot_be_stored(tmp_path, cache, full(cache))


def test_a_cache_of_another_user_stops_the_start(tmp_path: Path, cache: Path) -> None:
    """As a volume is that was made for the superuser, where the container runs as user 1000."""
    prefix = give_up_rights(cache)
    assert "Permission denied" in cannot_be_stored(tmp_path, cache, prefix)


@pytest.mark.parametrize("hub", HUBS)
def test_a_hub_that_cannot_be_reached_stops_the_start(hub: Hub, starts) -> None:
    assert NOT_REACHED in starts[hub].result()
