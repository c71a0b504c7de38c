"""`uvicorn app.main:app` serves the same service."""

import json
import signal
from pathlib import Path

import pytest
import uvicorn
from structlog.testing import capture_logs

from smart_embedder.errors import StartupError
from smart_embedder.server import process
from smart_embedder.server.process import exit_on_startup_error, stop_uvicorn
from tests.support.bad_start import run_to_the_end
from tests.support.server import run_server

ARGUMENTS = ("app.main:app", "--port", "0")


def test_uvicorn_serves_the_app_and_its_log_is_ours(
    tiny_m3: Path, tiny_qwen: Path, tmp_path: Path
) -> None:
    """The limits shown are those in force, which these models lower."""
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "RERANKER_MODEL": str(tiny_qwen)}
    limits = {"BGE_EMBED_MAX_LENGTH": "9000", "QWEN_RERANK_MAX_LENGTH": "50000"}
    more = {"LOG_FORMAT": "json", "MAX_QUEU_SIZE": "3"}
    with run_server(
        tmp_path, "uvicorn", arguments=ARGUMENTS, **settings, **limits, **more
    ) as server:
        server.wait_until_healthy()
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


def test_a_failed_start_ends_uvicorn_with_its_reason_as_the_last_line(tmp_path: Path) -> None:
    model = {"EMBEDDING_MODEL": str(tmp_path / "absent"), "LOG_LEVEL": "debug"}
    status, output = run_to_the_end(tmp_path, module="uvicorn", arguments=ARGUMENTS, **model)
    assert status == 1
    assert "start_failed" in output.splitlines()[-1]
    assert "absent does not exist" in output.splitlines()[-1]


@pytest.mark.parametrize("name", ["API_TOKENS_FILE"])
def test_a_wrong_setting_ends_uvicorn_with_one_sentence(tmp_path: Path, name: str) -> None:
    status, output = run_to_the_end(
        tmp_path, module="uvicorn", arguments=ARGUMENTS, **{name: "/absent"}
    )
    assert status == 1
    assert output.startswith(f"Smart Embedder cannot start: {name}=/absent ")
    assert output.count("\n") == 1


def test_an_app_that_cannot_be_created_is_one_sentence_and_a_status() -> None:
    with pytest.raises(SystemExit) as ended, exit_on_startup_error():
        raise StartupError("PORT is taken")
    assert ended.value.code == "Smart Embedder cannot start: PORT is taken"
    with pytest.raises(ZeroDivisionError), exit_on_startup_error():
        raise ZeroDivisionError


def test_a_failed_start_ends_uvicorn_and_no_other_server(monkeypatch) -> None:
    registered, ended = [], []
    monkeypatch.setattr(process.atexit, "register", lambda *call: registered.append(call))
    monkeypatch.setattr(process.os, "_exit", ended.append)
    error = StartupError("the folder is not there")
    with capture_logs() as log:
        stop_uvicorn(error)
    assert [each["event"] for each in log] == ["start_failed"], "it goes on, and is unhealthy"
    assert registered == []
    server = uvicorn.Server(uvicorn.Config(lambda: None))
    with server.capture_signals(), capture_logs() as log:
        stop_uvicorn(error)
    assert server.should_exit
    assert log == [], "the reason is the last line"
    ((call, *arguments),) = registered
    with capture_logs() as log:
        call(*arguments)
    assert ([each["event"] for each in log], ended) == (["start_failed"], [1])
