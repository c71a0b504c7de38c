"""examples/rag.py with the real service, and a language model that answers what it is told to."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.answering_http import Handler, serving
from tests.support.server import REPOSITORY, run_server

FILES = {
    "errors/pump.txt": "Error E42: the pump is blocked. Clean the filter and start again.",
    "errors/lid.md": "# Lid\n\nError E43: the lid is open. Close it until it clicks.",
    "guarantee.txt": "The guarantee covers two years from the day of purchase.",
}


class LanguageModel(ThreadingHTTPServer):
    """OpenAI's chat completions: `answer` for each request, which are kept."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = ""
        self.status = 200
        self.asked: list[tuple[str, str | None, dict]] = []


class _Handler(Handler):
    server: LanguageModel

    def respond(self) -> None:
        body = json.loads(self.read_body())
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        content = {"choices": [{"message": {"role": "assistant", "content": self.server.answer}}]}
        self.answer(self.server.status, json.dumps(content).encode())


@pytest.fixture
def llm() -> Iterator[LanguageModel]:
    with serving(LanguageModel()) as server:
        yield server


def test_an_answer_cites_the_files_and_what_is_cited_wrongly_is_told(
    demo_checkpoint: Path, tmp_path: Path, llm: LanguageModel
) -> None:
    manual = tmp_path / "manual"
    for name, text in FILES.items():
        (manual / name).parent.mkdir(parents=True, exist_ok=True)
        (manual / name).write_text(text)
    settings = {"EMBEDDING_MODEL": str(demo_checkpoint), "RERANKER_MODEL": "late-interaction"}
    with run_server(tmp_path, **settings) as service:

        def ask(folder: Path, key: str) -> "subprocess.CompletedProcess[str]":
            return subprocess.run(
                [sys.executable, REPOSITORY / "examples/rag.py", folder, "What does E42 mean?"],
                env={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": str(REPOSITORY / "client" / "src"),
                    "SMART_EMBEDDER_URL": service.url,
                    "LLM_URL": f"http://127.0.0.1:{llm.server_port}/v1/",
                    "LLM_MODEL": "a-model",
                    "LLM_KEY": key,
                },
                capture_output=True,
                text=True,
                check=False,
            )

        llm.answer = "The pump is blocked [1]. Clean it [1, 9]."
        done = ask(manual, "my-key")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            llm.answer,
            "",
            "[1] errors/pump.txt",
            "[9] is no passage that the model was given: do not trust it.",
        ]
        ((path, token, body),) = llm.asked
        assert (path, token, body["model"]) == ("/v1/chat/completions", "Bearer my-key", "a-model")
        question = body["messages"][1]["content"]
        assert question.startswith(f"[1] {FILES['errors/pump.txt']}\n\n[2] ")
        assert question.endswith("\n\nQuestion: What does E42 mean?")
        assert all(text in question for text in FILES.values())

        llm.answer = "The pump is blocked."
        assert "No passage is cited" in ask(manual, "").stdout
        assert llm.asked[-1][1] is None

        llm.status = 500
        failed = ask(manual, "")
        assert failed.returncode == 1
        assert "500" in failed.stderr
        (tmp_path / "empty").mkdir()
        assert "has no text" in ask(tmp_path / "empty", "").stderr
