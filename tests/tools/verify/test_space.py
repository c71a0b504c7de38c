"""`tools.verify --space`: whether vectors of two servers may be mixed, and why."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.answering_http import answering
from tests.support.printed import run_printed
from tests.support.server import REPOSITORY, run_server
from tools.verify.__main__ import main
from tools.verify.canaries import CANARIES

ROWS = np.random.default_rng(3).normal(size=(len(CANARIES), 64)).astype(np.float32)
ROWS /= np.linalg.norm(ROWS, axis=1, keepdims=True)
SPACE = "dense-0123456789ab"
HEALTH = {"status": "healthy", "version": "2.0.0", "model": "m"}
MODELS = {"data": [{"id": "m"}]}


def openai(rows: Any, models: Any = MODELS) -> dict[str, Any]:
    data = [{"index": i, "embedding": row} for i, row in enumerate(np.asarray(rows).tolist())]
    return {"/v1/models": models, "/v1/embeddings": {"data": data[::-1]}}


def native(
    rows: Any, space: str = SPACE, dtype: str = "float32", sparse: Any = None
) -> dict[str, Any]:
    data = [
        {"embeddings": {"dense": row, "sparse": sparse, "colbert": None}}
        for row in np.asarray(rows).tolist()
    ]
    info = {"dtype": dtype, "paths": {"linear": "native", "embed": "torch"}, "kernels": "avx2.1"}
    health = {**HEALTH, "served_models": [{"name": "m", "info": info}, {"name": "n", "info": None}]}
    facts = {"dense_model_name": "m", "vector_space": {"dense": space}}
    return {"/health": health, "/embeddings/": {"data": data, **facts}}


def verify(path: Path, *arguments: str) -> tuple[int, str]:
    return run_printed(main, "--space", str(path), *arguments)


def compare(path: Path, before: dict[str, Any], now: dict[str, Any]) -> tuple[int, str]:
    """Store the vectors of one server, then compare another one with them."""
    for answers in (before, now):
        with answering(answers) as url:
            status, output = verify(path / "space.json", "--url", url)
        if answers is before:
            assert status == 0, output
    return status, output


NEAR = ROWS + np.float32(1e-5)
FAR = ROWS[::-1]
SPARSE = {"indices": [3, 7], "values": [0.5, 0.25]}


@pytest.mark.parametrize(
    ("before", "now", "status", "message"),
    [
        (
            native(ROWS),
            native(NEAR),
            0,
            "may be mixed: they have the same space; distance 3.2e-09 at",
        ),
        (native(ROWS), native(FAR), 1, "report the same space, but the numbers differ; distance 9"),
        (
            native(ROWS),
            native(ROWS, "dense-ba9876543210"),
            1,
            f"MAY NOT be mixed: they have another space: dense-ba9876543210, was {SPACE}; dist",
        ),
        (native(ROWS), native(NEAR, dtype="int8"), 0, "number format: int8, was float32"),
        (openai(ROWS), native(NEAR), 0, "kernels: native torch avx2.1, was unknown"),
        (native(ROWS), native(ROWS[:, :32]), 1, "they have 32 dimensions, and had 64"),
        (native(ROWS), openai(NEAR), 0, "may be mixed: their numbers agree; a server"),
        (openai(ROWS), openai(FAR), 1, "MAY NOT be mixed: their numbers differ; a server"),
        (openai(7 * ROWS), openai(7 * ROWS), 0, "distance 0.0e\\+00 at most"),
        (openai(ROWS), openai(7 * NEAR), 1, "agree.*length is 7.*, and was 1.*scaling to length 1"),
        (native(ROWS, sparse=SPARSE), native(ROWS), 0, "sparse: not compared: only .*space.json"),
        (openai(ROWS), openai(0 * ROWS), 1, "their length is 0, and was 1"),
    ],
)
def test_the_verdict_has_a_reason(tmp_path, before, now, status, message) -> None:
    found, output = compare(tmp_path, before, now)
    assert found == status, output
    assert re.search(message, output), output


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({}, r"/v1/models was refused: 404 no"),
        ({"/health": HEALTH, "/embeddings/": 503}, r"/embeddings/ was refused: 503 no"),
        (openai(ROWS, {"data": [{"id": "a"}, {"id": "b"}]}), r"2 models: .* --model \(a, b\)"),
        (openai(ROWS[1:]), "sent dense vectors with NaN, or too few"),
        (openai(ROWS * np.nan), "sent dense vectors with NaN, or too few"),
        (openai(ROWS) | {"/v1/embeddings": [1]}, "sent a response of another shape: TypeError"),
        (native(ROWS) | {"/embeddings/": {"data": []}}, "response of another shape: IndexError"),
        (native(ROWS) | {"/embeddings/": {"data": [{"embeddings": []}]}}, "shape: TypeError"),
    ],
)
def test_an_invalid_response_is_an_error_of_one_sentence(tmp_path, answers, message) -> None:
    with answering(answers) as url:
        status, output = verify(tmp_path / "space.json", "--url", url)
    assert status == 2
    assert re.search(f"^Nothing was compared: .*{message}.*$", output), output
    assert output.count("\n") == 1
    assert not (tmp_path / "space.json").exists()


@pytest.mark.parametrize("content", ["", "{}", '{"texts": [], "kinds": {"dense": [1]}}'])
def test_another_file_is_an_error_and_stays_as_it_is(tmp_path, content) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    status, output = verify(path, "--url", "http://127.0.0.1:9")
    assert status == 2
    assert "was not written by --space" in output
    assert path.read_text() == content


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with answering(native(ROWS)) as url:
        status, output = verify(tmp_path / "no" / "space.json", "--url", url)
    assert status == 2
    assert output.endswith("space.json cannot be written: No such file or directory\n")


def test_a_server_is_compared_with_itself_by_either_api_without_pytorch(tmp_path, tiny_m3) -> None:
    path, module = tmp_path / "space.json", [sys.executable, "-X", "importtime", "-m"]
    with run_server(tmp_path, EMBEDDING_MODEL=str(tiny_m3)) as running:
        command = [*module, "tools.verify", "--space", str(path), "--url", running.url]
        first = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert first.returncode == 0, first.stderr[-2000:]
        assert not re.search(r"\| +(torch|transformers|FlagEmbedding)$", first.stderr, re.MULTILINE)
        status, output = verify(path, "--url", running.url)
        assert status == 0, output
        mixed = re.findall(r"(\w+): may be mixed: they have the same space", output)
        assert mixed == ["dense", "sparse", "colbert"]
        assert output.count("distance 0.0e+00 at most") == 3
        with running.client() as client:
            body = {"input": CANARIES}
            answers = {"/v1/models": {"data": [{"id": "m"}]}}
            answers["/v1/embeddings"] = client.post("/v1/embeddings", json=body).json()
    with answering(answers) as url:
        status, output = verify(path, "--url", f"{url}/v1")
    assert status == 0, output
    assert "dense: may be mixed: their numbers agree" in output
    assert output.count(f"not compared: only {path} has such vectors") == 2
