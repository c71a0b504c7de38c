"""The smoke check passes against a healthy server, and fails against anything else."""

import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.answering_http import answering
from tests.support.printed import run_printed
from tests.support.server import REPOSITORY, run_server
from tools.service import Service
from tools.smoke.__main__ import main, run_check


def smoke(url: str, *arguments: str) -> tuple[int, str]:
    return run_printed(main, "--url", url, *arguments)


def counts(output: str) -> tuple[int, int, int]:
    """How many checks passed, how many ran, and how many were skipped."""
    (found,) = re.findall(r"^(\d+) of (\d+) passed, (\d+) skipped\.$", output, re.MULTILINE)
    passed, total, skipped = map(int, found)
    return passed, total, skipped


def skipped(output: str) -> list[str]:
    """The reasons why checks were skipped."""
    return re.findall(r"^skipped .*\(([^()]+)\)$", output, re.MULTILINE)


def test_a_healthy_server_passes_all_checks_within_the_default_burst(
    tiny_m3: Path, tiny_qwen: Path, tmp_path: Path
) -> None:
    settings = {"RATE_LIMIT_REQUESTS_PER_MINUTE": "1", "RATE_LIMIT_BURST_SIZE": "60"}
    settings |= dict.fromkeys(("DENSE_EMBEDDING_MODEL", "RERANKER_MODEL"), str(tiny_qwen))
    with run_server(tmp_path, EMBEDDING_MODEL=str(tiny_m3), **settings) as running:
        status, output = smoke(running.url)
    assert status == 0, output
    assert skipped(output) == ["no token was given"]


@pytest.fixture(scope="module")
def closed_server(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory):
    """A server with a token, also for metrics, and without a reranker."""
    settings = {"API_TOKEN": "hush-hush", "PROTECT_METRICS": "true", "RERANKER_MODEL": "none"}
    folder = tmp_path_factory.mktemp("closed")
    with run_server(folder, EMBEDDING_MODEL=str(tiny_m3), **settings) as running:
        yield running


def test_a_server_with_a_token_and_without_a_reranker_passes_by_the_command_of_version_1(
    closed_server,
) -> None:
    command = [sys.executable, "test_server.py", "--url", closed_server.url, "--token", "hush-hush"]
    done = subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert skipped(done.stdout) == ["RERANKER_MODEL is none"]
    assert "hush" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "No token was sent"), (["--token", "hush-not"], "The token is unknown")],
)
def test_checks_fail_without_the_correct_token(
    closed_server, arguments: list[str], message: str
) -> None:
    status, output = smoke(closed_server.url, *arguments)
    assert (status, output.count("FAILED  ")) == (1, 6)
    assert message in output
    assert "hush" not in output


def test_each_wrong_response_of_a_server_fails_its_check(tiny_m3, tmp_path) -> None:
    module = "tests.tools.smoke.lying_server"
    with run_server(tmp_path, module, EMBEDDING_MODEL=str(tiny_m3)) as running:
        status, output = smoke(running.url, "--token", "hush")
    assert status == 1
    assert "expected (401, 'unauthorized'), saw (" in output
    assert "hush" not in output
    failed = re.findall(r"^FAILED  (.*?)(?: \(|$)", output, re.MULTILINE)
    assert failed == [
        "A request for work without a token, or with a wrong one, is 401 with WWW-Authenticate",
        "Empty input is 400, a malformed body 422, an unknown path 404, all in one form",
        "One request returns dense, sparse and ColBERT vectors of each text, in the texts' order",
        "A text longer than the model's limit is truncated, and the warning has the numbers",
        "Each passage is returned once, the best first; equal scores keep the request's order",
        "/stats has the totals of /metrics",
    ]
    passed, total, _ = counts(output)
    assert total - passed == len(failed)


def test_a_response_of_another_shape_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def check(_: Service) -> None:
        """The response has a text."""
        raise KeyError("text")

    with closing(Service("http://127.0.0.1:9", None)) as service:
        assert run_check(check, service) == "FAILED"
    assert capsys.readouterr().out == "FAILED  The response has a text (KeyError: 'text')\n"


def test_a_server_that_is_not_healthy_is_not_checked() -> None:
    health = {"version": "2", "model": "m", "status": "loading", "reason": "the models are loaded"}
    with answering({"/health": health}) as url:
        error = f"Nothing was checked: the service at {url} is not ready: the models are loaded\n"
        assert smoke(url) == (1, error)


def test_another_server_or_none_is_an_error_of_one_sentence() -> None:
    with answering({"/health": {"status": "healthy"}}) as url:
        error = f"Nothing was checked: the server at {url} is no Smart Embedder: see its /health\n"
        assert smoke(url) == (1, error)
    status, output = smoke("http://127.0.0.1:9")
    assert (status, output.count("\n")) == (1, 1)
    assert output.startswith("Nothing was checked: cannot reach http://127.0.0.1:9: ")
