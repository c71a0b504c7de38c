"""The smoke check passes against a healthy server, and fails against anything else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from smart_embedder.api.answers import EmbeddingResponse
from tests.support.answering_http import answering
from tests.support.printed import run_printed
from tests.support.server import REPOSITORY, run_server
from tools.smoke.__main__ import _outcome, main
from tools.smoke.target import Target


def smoke(url: str, *arguments: str) -> tuple[int, str]:
    return run_printed(main, "--url", url, *arguments)


def counts(output: str) -> tuple[int, int, int]:
    """Checks that passed, that were tried, and that were skipped."""
    (found,) = re.findall(r"^(\d+) of (\d+) passed, (\d+) skipped\.$", output, re.MULTILINE)
    passed, tried, skipped = map(int, found)
    return passed, tried, skipped


def skipped(output: str) -> list[str]:
    """Why checks were skipped."""
    return re.findall(r"^skipped .*\(([^()]+)\)$", output, re.MULTILINE)


OPEN = ["no token is asked for", "no token was given", "the service is healthy", "there was none"]
OTHERS = [*OPEN, "another model makes the dense vectors", "there is a reranker"]


@pytest.mark.parametrize(
    ("settings", "models", "left_out"),
    [
        pytest.param(
            {"RATE_LIMIT_REQUESTS_PER_MINUTE": "1", "RATE_LIMIT_BURST_SIZE": "60"},
            {},
            [*OPEN, "there is a reranker"],
            id="gently, within the default burst",
        ),
        ({}, {"DENSE_EMBEDDING_MODEL": "tiny_qwen", "RERANKER_MODEL": "tiny_qwen"}, OTHERS),
    ],
)
def test_a_healthy_server_passes_everything(
    request, settings: dict, models: dict, left_out: list[str], tiny_m3: Path, tmp_path: Path
) -> None:
    paths = {name: str(request.getfixturevalue(model)) for name, model in models.items()}
    with run_server(tmp_path, EMBEDDING_MODEL=str(tiny_m3), **settings, **paths) as running:
        status, output = smoke(running.url)
    assert status == 0, output
    passed, tried, left = counts(output)
    assert (passed, left) == (tried, len(left_out)), output
    assert sorted(skipped(output)) == sorted(left_out)


def the_failure(output: str) -> str:
    """The only line of a check that failed."""
    (failed,) = re.findall(r"^FAILED .*$", output, re.MULTILINE)
    return failed


@pytest.fixture(scope="module")
def closed_server(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory):
    """A server that requires a token wherever it can, and does not rerank."""
    settings = {"API_TOKEN": "hush-hush", "PROTECT_METRICS": "true", "RERANKER_MODEL": "none"}
    folder = tmp_path_factory.mktemp("closed")
    with run_server(folder, EMBEDDING_MODEL=str(tiny_m3), **settings) as running:
        yield running


def test_a_server_with_a_token_and_without_a_reranker_passes(closed_server) -> None:
    status, output = smoke(closed_server.url, "--token", "hush-hush")
    assert status == 0, output
    assert sorted(skipped(output)) == [
        "RERANKER_MODEL is none",
        "the service is healthy",
        "there was none",
    ]
    assert "hush" not in output


def test_the_command_of_version_1_checks_the_server_too(closed_server) -> None:
    command = [sys.executable, "test_server.py", "--url", closed_server.url]
    done = [
        subprocess.run(
            [*command, "--token", token], cwd=REPOSITORY, check=False, stdout=subprocess.PIPE
        )
        for token in ("hush-hush", "another")
    ]
    assert [run.returncode for run in done] == [0, 1]
    passed, tried, _ = counts(done[0].stdout.decode())
    assert passed == tried


@pytest.mark.parametrize(
    ("asked", "arguments", "told"),
    [
        ("closed_server", [], "it asks for a token and none was given: it needs --token"),
        ("closed_server", ["--token", "hush-not"], "it asks for a token and refuses this one"),
        ("server", ["--token", "hush"], "a token was given, and this service asks for none"),
    ],
)
def test_without_the_right_token_it_says_so(request, asked: str, arguments, told: str) -> None:
    status, output = smoke(request.getfixturevalue(asked).url, *arguments)
    assert status == 1
    assert told in the_failure(output)
    assert (told in skipped(output)) == (asked == "closed_server")
    assert "hush" not in output


def test_a_server_that_is_loading_fails_and_its_work_is_skipped(tiny_m3, tmp_path: Path) -> None:
    module = "tests.tools.smoke.loading_server"
    with run_server(tmp_path, module, healthy=False, EMBEDDING_MODEL=str(tiny_m3)) as running:
        status, output = smoke(running.url)
    assert status == 1
    assert "saw 'loading: the models are being loaded'" in the_failure(output)
    assert skipped(output).count("the service is loading") > 6
    assert "ok      While loading, draining or unhealthy" in output


def test_a_server_that_breaks_the_contract_is_caught_in_every_point(tiny_m3, tmp_path) -> None:
    module = "tests.tools.smoke.lying_server"
    with run_server(tmp_path, module, EMBEDDING_MODEL=str(tiny_m3)) as running:
        status, output = smoke(running.url)
    assert status == 1
    failed = re.findall(r"^FAILED  (.*?)(?: \(|$)", output, re.MULTILINE)
    assert failed == [
        "What is empty is 400, what is malformed 422, in the one shape of errors",
        "ColBERT has one vector for each token but the first",
        "A text longer than the model reads is cut, and the warning counts its tokens exactly",
        "Every passage comes back once, by falling score; equal scores keep the request's order",
        "/stats says the same as /metrics",
    ]
    assert counts(output)[1] - counts(output)[0] == len(failed)


def test_an_answer_of_another_shape_is_a_failure_that_names_the_place() -> None:
    def check(_: Target) -> None:
        EmbeddingResponse.model_validate_json(b'{"data": [{"id": 0}]}', strict=True)

    outcome, why = _outcome(check, None)
    assert outcome == "FAILED"
    assert why == "expected the contract's shape, saw data.0.text: Field required"


def test_what_is_no_smart_embedder_is_told_in_one_sentence() -> None:
    with answering({"/health": {"status": "healthy"}}) as url:
        told = f"Nothing was checked: what answers at {url} is no Smart Embedder: see its /health\n"
        assert smoke(url) == (1, told)
    status, output = smoke("http://127.0.0.1:9")
    assert (status, output.count("\n")) == (1, 1)
    assert output.startswith("Nothing was checked: cannot reach http://127.0.0.1:9: ")
