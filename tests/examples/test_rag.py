"""examples/rag.py with a real service and a simulated language model."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest

from tests.support.answering_http import Handler, serving, url_of
from tests.support.server import REPOSITORY, RunningServer, free_port, run_server

# The environment of scripts/check_examples.sh, if it exists.
ENVIRONMENT = REPOSITORY / ".venv-examples/rag/bin/python"
PYTHON = ENVIRONMENT if ENVIRONMENT.exists() else sys.executable

FILES = {
    "errors/pump.txt": "Error E42: the pump is blocked. Clean the filter and start again.",
    "errors/lid.md": "# Lid\n\nError E43: the lid is open. Close it until it clicks.",
    "guarantee.txt": "The guarantee covers two years from the day of purchase.",
}


class LanguageModel(ThreadingHTTPServer):
    """Answers chat completions with `answer`, and keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = ""
        self.status = 200
        self.requests: list[tuple[str, str | None, dict]] = []


class _Handler(Handler):
    server: LanguageModel

    def respond(self) -> None:
        body = json.loads(self.read_body())
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        content = {"choices": [{"message": {"role": "assistant", "content": self.server.answer}}]}
        self.answer(self.server.status, json.dumps(content).encode())


@pytest.fixture
def llm() -> Iterator[LanguageModel]:
    with serving(LanguageModel()) as server:
        yield server


@pytest.fixture(scope="module")
def service(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    settings = {"EMBEDDING_MODEL": str(demo_checkpoint), "RERANKER_MODEL": "late-interaction"}
    with run_server(tmp_path_factory.mktemp("service"), **settings) as running:
        yield running


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    folder = tmp_path / "manual"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def ask(
    folder: Path, service: RunningServer, llm_url: str, key: str = ""
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [PYTHON, REPOSITORY / "examples/rag.py", folder, "What does E42 mean?"],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY / "client" / "src"),
            "SMART_EMBEDDER_URL": service.url,
            "LLM_URL": llm_url,
            "LLM_MODEL": "a-model",
            "LLM_KEY": key,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def texts_embedded(service: RunningServer) -> int:
    return httpx2.get(f"{service.url}/stats").json()["total_sentences"]


def test_rag_answer_cites_files_and_warns_of_wrong_citations(
    manual: Path, service: RunningServer, llm: LanguageModel
) -> None:
    llm.answer = "The pump is blocked [1]. Clean it [1, 9]."
    (manual / "old.txt").write_bytes("Café".encode("cp1252"))
    done = ask(manual, service, f"{url_of(llm)}/v1/", key="my-key")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("left out old.txt: 'utf-8' codec can't decode")
    assert done.stdout.splitlines() == [
        llm.answer,
        "",
        "[1] errors/pump.txt",
        "[9] is no passage that the model was given: do not trust it.",
    ]
    _, (path, token, body) = llm.requests
    assert (path, token, body["model"]) == ("/v1/chat/completions", "Bearer my-key", "a-model")
    question = body["messages"][1]["content"]
    assert question.startswith(f"[1] {FILES['errors/pump.txt']}\n\n[2] ")
    assert question.endswith("\n\nQuestion: What does E42 mean?")
    assert all(text in question for text in FILES.values())

    llm.answer = "The pump is blocked."
    assert "No passage is cited" in ask(manual, service, f"{url_of(llm)}/v1/").stdout
    assert llm.requests[-1][1] is None


def test_rag_without_a_language_model_ends_before_it_embeds(
    manual: Path, service: RunningServer, llm: LanguageModel, tmp_path: Path
) -> None:
    before = texts_embedded(service)
    url = f"http://127.0.0.1:{free_port()}"
    expected = {url: "[Errno 111] Connection refused"}
    llm.status = 404
    expected[url_of(llm)] = '404: {"choices"'
    for address, reason in expected.items():
        done = ask(manual, service, address)
        (sentence,) = done.stderr.splitlines()
        assert done.returncode == 1
        assert sentence.startswith(f"The language model at {address} (LLM_URL) does not answer: ")
        assert reason in sentence
    assert texts_embedded(service) == before

    (tmp_path / "empty").mkdir()
    assert "has no text" in ask(tmp_path / "empty", service, url).stderr
