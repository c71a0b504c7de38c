"""The start of the server: its exit status, its log, and the errors of a failed start."""

import gc
import io
import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from app import run as process
from app.run import (
    _exit,
    _flush,
    _print_example,
    delay_garbage_collection,
    freeze_startup_objects,
    log_failure,
    log_memory,
    log_ready,
    run,
    serve,
)
from app.settings import Settings
from smart_embedder.errors import StartupError
from smart_embedder.requests import ANSWER_BYTES
from tests.smart_embedder.fakes import FakeModel, FakeReranker, loaded
from tests.support.bad_start import run_until_exit
from tests.support.script import run_script
from tests.support.server import run_server

UVICORN = ("app.main:app", "--port", "0")


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("app", ["--prot=1"], "there is no flag --prot: the nearest is --port; --help "),
        ("uvicorn", UVICORN, "API_TOKENS_FILE=/absent "),
    ],
)
def test_a_wrong_setting_stops_the_start_before_the_port_opens(
    tmp_path: Path, module: str, arguments: Sequence[str], message: str
) -> None:
    status, output = run_until_exit(
        tmp_path, module=module, arguments=arguments, API_TOKENS_FILE="/absent"
    )
    assert (status, output.count("\n")) == (1, 1)
    assert output.startswith(f"Smart Embedder cannot start: {message}")


@pytest.mark.parametrize("module", ["app", "uvicorn"])
def test_the_last_log_line_of_a_failed_start_is_its_reason(tmp_path, module) -> None:
    model = {"EMBEDDING_MODEL": str(tmp_path / "absent"), "LOG_LEVEL": "debug"}
    arguments = UVICORN if module == "uvicorn" else ()
    status, output = run_until_exit(tmp_path, module=module, arguments=arguments, **model)
    assert status == 1
    assert "Finished server process" in output
    last = output.splitlines()[-1]
    assert "start_failed" in last
    assert f"the model folder {tmp_path / 'absent'} does not exist" in last


WITHOUT_HOME = ["unshare", "--user", "--map-user=54321", "--map-group=54321", "env", "-u", "HOME"]


def test_a_local_model_is_served_without_a_home_folder(tmp_path: Path, tiny_m3: Path) -> None:
    """The user has no entry in the password database."""
    tried = subprocess.run([*WITHOUT_HOME, "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no other user may be had here: {tried.stderr.decode().strip()}")
    with run_server(tmp_path, prefix=WITHOUT_HOME, EMBEDDING_MODEL=str(tiny_m3)) as server:
        assert server.stop() == 0
    assert server.log.count("Reranker ready. ") == 1
    assert server.log.count("Server ready to accept requests ") == 1
    assert str(tiny_m3.parent) not in server.log
    assert "server process" not in server.log  # uvicorn's own lines are at debug.
    assert f"curl -s {server.url}/embeddings/" in server.log


@pytest.mark.parametrize(
    ("body", "answer", "missing"),
    [
        (1000, ANSWER_BYTES, None),
        (250, ANSWER_BYTES, "3 MB"),
        (1000, ANSWER_BYTES // 2, "1 MB"),
        (0, ANSWER_BYTES, "999 MB"),
    ],
)
def test_memory_short_names_the_missing_memory(body, answer, missing) -> None:
    settings = Settings(max_body_bytes=1000)
    with capture_logs() as log:
        log_memory(settings, body, answer, left=1_000_000)
    assert [entry["missing"] for entry in log] == ([] if missing is None else [missing])
    if missing is not None:
        (line,) = log
        assert (line["event"], line["left"]) == ("memory_short", "1 MB")
        sizes = (line["largest_body_bytes"], line["largest_answer_bytes"])
        assert sizes == (body, answer)


# In process.


class Ended(BaseException):
    """The process would have ended with this status."""


@pytest.fixture
def ends(monkeypatch) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(process.sys, "exit", end)
    monkeypatch.setattr(process.os, "_exit", lambda status: end(-1 - status))


@pytest.fixture
def kept_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_token": "open"}, False),
        ({"host": "0.0.0.0", "api_tokens_file": os.devnull}, False),
        ({"host": "127.0.0.1"}, False),
    ],
)
def test_no_token_is_logged_unless_the_address_is_loopback(
    settings, warned: bool, monkeypatch, ends, kept_signals
) -> None:
    monkeypatch.setattr(process, "serve", lambda *_: 0)
    monkeypatch.setattr(process, "load_settings", lambda _: Settings(**settings))
    for name in ("configure_logs", "require_port", "delay_garbage_collection"):
        monkeypatch.setattr(process, name, lambda *_, **__: None)
    with capture_logs() as log, pytest.raises(Ended):
        run(None)
    # The environment of the machine may hold a name that is warned about, too.
    notes = [entry["note"] for entry in log if entry["event"] == "no_token"]
    assert len(notes) == warned
    assert all("set API_TOKEN or API_TOKENS_FILE" in note for note in notes)


@pytest.mark.parametrize(("threads", "status"), [(1, "3"), (2, "-4")])
def test_exit_does_not_wait_for_threads(threads, status, monkeypatch, ends) -> None:
    monkeypatch.setattr(process.threading, "active_count", lambda: threads)
    monkeypatch.setattr(process.logging, "shutdown", lambda: None)
    with pytest.raises(Ended, match=f"^{status}$"):
        _exit(3)


def test_output_to_a_closed_pipe_is_dropped(tmp_path: Path) -> None:
    _flush(io.StringIO())
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as stream:
        stream.write("x" * 10)
        _flush(stream)
        stream.flush()


@pytest.mark.parametrize(("tokens", "ui"), [({}, True), ({"api_token": "secret"}, False)])
def test_the_printed_example_has_the_token_as_a_variable(tokens, ui, monkeypatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(process, "print_beside_log", texts.append)
    _print_example("http://a:1", Settings(ui=ui, **tokens))
    (printed,) = texts
    assert "curl -s http://a:1/embeddings/" in printed
    assert ("See it: http://a:1/ui" in printed) == ui
    assert ("Bearer $API_TOKEN" in printed) == ("Requests need a token" in printed) == bool(tokens)
    assert "secret" not in printed


class StartedServer:
    """A server that calls `when_running` while it runs."""

    url = "http://a:1"

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.should_exit = False
        self.started = True

    def run(self) -> None:
        self.when_running()


def test_a_port_taken_after_its_check_is_reported_in_the_same_words(monkeypatch) -> None:
    """Another start may take the port in the meantime, and uvicorn does not explain it."""

    class Refused(StartedServer):
        def run(self, _sockets) -> None:
            raise SystemExit(1)

    monkeypatch.setattr(process, "DrainingServer", Refused)
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = Settings(port=other.getsockname()[1])
        with pytest.raises(StartupError, match=r"port \d+ of 127\.0\.0\.1 is in use: stop the"):
            serve(settings, lambda *_, **__: "app")


def test_garbage_collection_spares_the_objects_of_the_start() -> None:
    usual = gc.get_threshold()
    delay_garbage_collection()
    try:
        assert gc.get_threshold() > usual
        tracked = len(gc.get_objects())
        freeze_startup_objects()
        assert gc.get_freeze_count() > 0.9 * tracked
        assert gc.get_threshold() == usual
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)


# The log lines of a start, for which people and scripts wait.


READY = "Server ready to accept requests"


def test_the_ready_lines_have_the_url_and_the_effective_limits() -> None:
    reranker, embedder = FakeReranker(), loaded(FakeModel(), 640)
    reranker.name, reranker.max_length, reranker.max_batch_sequences = "scores", 77, 4
    scoring_itself = replace(embedder, late_interaction=True, demo="a small model")
    with capture_logs() as log:
        log_ready(replace(embedder, reranker=reranker), "http://127.0.0.1:8000")
        log_ready(scoring_itself)
        log_ready(embedder)
    own = {"model": "scores", "max_length": 77, "max_pairs_in_forward": 4}
    reads = {"model": "fake", "max_length": 100}
    in_force = reads | {"device": "fake", "dtype": "float32", "attention": "sdpa"}
    in_force |= {"event": READY, "log_level": "info", "max_batch_tokens": 640}
    assert log == [
        {"event": "Reranker ready.", "log_level": "info"} | own,
        in_force | {"url": "http://127.0.0.1:8000"},
        {"event": "Reranker ready.", "log_level": "info"} | reads,
        {"event": "demo_model", "log_level": "warning", "note": "a small model"},
        in_force,
        in_force,
    ]


@pytest.mark.parametrize("unforeseen", [False, True])
def test_only_an_unexpected_error_of_the_start_has_a_traceback(
    unforeseen: bool,
) -> None:
    error = ValueError("one\ntwo") if unforeseen else StartupError("the folder is not there")
    with capture_logs() as log:
        log_failure(error)
    assert [entry["event"] for entry in log] == ["unexpected_error"] * unforeseen + ["start_failed"]
    assert log[-1]["reason"] == (
        "unexpected error while loading: ValueError: one"
        if unforeseen
        else "the folder is not there"
    )
    assert [entry["exc_info"] for entry in log[:-1]] == [error] * unforeseen


# `uvicorn app.main:app` serves the same service.


def test_uvicorn_serves_the_app_with_the_services_log(
    tiny_m3: Path, tiny_qwen: Path, tmp_path: Path
) -> None:
    """The log shows the effective limits, which these models lower."""
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "RERANKER_MODEL": str(tiny_qwen)}
    limits = {"BGE_EMBED_MAX_LENGTH": "9000", "QWEN_RERANK_MAX_LENGTH": "50000"}
    more = {"LOG_FORMAT": "json", "MAX_QUEU_SIZE": "3"}
    with run_server(tmp_path, "uvicorn", arguments=UVICORN, **settings, **limits, **more) as server:
        with server.client() as client:
            assert client.post("/embeddings/", json={"sentences": ["a"]}).status_code == 200
            metrics = client.get("/metrics").text
        assert server.stop() == -signal.SIGTERM
    (info,) = [line for line in metrics.splitlines() if line.startswith("embedding_server_info{")]
    assert 'bge_embed_max_length="8192"' in info
    assert 'qwen_rerank_max_length="40960"' in info
    lines = [json.loads(line) for line in server.lines]
    events = [line["event"] for line in lines]
    for event in ("unknown_setting", "Reranker ready.", "Server ready to accept requests"):
        assert events.count(event) == 1
    assert sum("POST" in line for line in server.lines) == 1
    (reranker,) = [line for line in lines if line["event"] == "Reranker ready."]
    assert (reranker["max_length"], reranker["max_pairs_in_forward"]) == (40960, 16)


SIGNALLED = """
import os, runpy, sys

number = int(sys.argv.pop())

class Signal:
    def find_spec(self, name, *_):
        if name == "app.main":
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Signal())
runpy.run_module("app", run_name="__main__")
"""


def test_a_signal_during_the_imports_exits_without_a_traceback(tmp_path: Path) -> None:
    done = run_script(SIGNALLED, str(int(signal.SIGINT)), folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
