"""`python -m tools.evaluate` with a running service."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import BertForMaskedLM, BertModel

from tests.support.server import REPOSITORY, RunningServer, run_server
from tests.support.wordpiece import save_colbert, save_splade
from tools.evaluate import __main__ as tool
from tools.evaluate.evaluation import Row
from tools.evaluate.representations import KINDS, all_representations

pytestmark = pytest.mark.long

NAMES = [representation.name for representation in all_representations(frozenset(KINDS))]
QUESTIONS = Path(__file__).parents[1] / "demo" / "questions"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo's questions with only the first four passages and queries."""
    folder = tmp_path / "few-questions"
    shutil.copytree(QUESTIONS, folder)
    for file in ("corpus.jsonl", "queries.jsonl"):
        lines = (QUESTIONS / file).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / file).write_text("".join(lines[:4]), encoding="utf-8")
    return folder


def run(*arguments: str | Path) -> dict[str, Row]:
    return {row.representation: row for row in tool.run(tool.parse(list(map(str, arguments))))}


def test_every_representation_is_measured_reranked_and_reported(
    server: RunningServer, folder: Path, tmp_path: Path, capsys
) -> None:
    file = tmp_path / "figures.json"
    options = ("--rerank", "2", "--json", file, "--token", "a secret")
    found = run(folder, "--url", server.url, *options)
    assert list(found) == [*NAMES, "dense, reranked"]
    assert all(row.figures["recall@100"] == 1 for row in found.values() if row.bytes_per_document)
    assert found["dense"].difference is None
    printed = capsys.readouterr().out
    assert "few-questions: 4 documents, 4 queries." in printed
    assert "Left out: 116 judged queries that are not among the queries." in printed
    assert f"{found['fused'].figures['nDCG@10']:.4f}" in printed
    # With four queries no difference is significant.
    assert printed.count("no difference shown") == len(NAMES)
    report = json.loads(file.read_text())
    assert [row["representation"] for row in report["rows"]] == list(found)
    assert report["options"]["rerank"] == "2"
    assert "secret" not in file.read_text()
    (row,) = run(folder, "--url", server.url, "--only", "sparse", "--rerank", "0").values()
    assert row == Row(row.representation, found["sparse"].figures, row.bytes_per_document,
                      row.interval, None)  # fmt: skip
    with pytest.raises(tool.DatasetError, match="'colour' is not among the representations: dense"):
        run(folder, "--url", server.url, "--only", "dense; colour")


def test_models_of_models_are_evaluated_and_colbert_always_gets_input_types(
    tiny_m3: Path, tiny_reranker: Path, folder: Path, tmp_path: Path
) -> None:
    splade = save_splade(tmp_path / "splade", BertForMaskedLM)
    colbert = save_colbert(tmp_path / "colbert", BertModel)
    names = "".join(f"- name: {model}\n" for model in (splade, colbert))
    models = f"{names}- {{name: {tiny_reranker}, task: rerank}}\n"
    (tmp_path / "models.yaml").write_text(models, "utf-8")
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "RERANKER_MODEL": "none", "DTYPE": "float32"}
    with run_server(tmp_path, MODELS="models.yaml", **settings) as server:
        arguments = (folder, "--url", server.url, "--model")
        by_splade = run(*arguments, "splade", "--reranker", tiny_reranker.name)
        assert list(by_splade) == ["sparse", "sparse, reranked"]
        by_colbert = run(*arguments, "colbert")
        typed = run(*arguments, "colbert", "--input-types")
        assert all(name.startswith(("colbert", "muvera")) for name in by_colbert)
        assert by_colbert == typed
        with server.client() as client:
            body = {"sentences": ["a"], "model": "colbert", "input_type": "query"}
            query = client.post("/embeddings", json=body).json()["data"][0]["embeddings"]
            body |= {"input_type": "document"}
            text = client.post("/embeddings", json=body).json()["data"][0]["embeddings"]
        assert query != text, "the input type makes a difference"


def test_an_error_is_one_sentence(monkeypatch, folder: Path, capsys) -> None:
    for arguments, sentence in {
        ("nowhere",): "corpus.jsonl is missing",
        (str(folder), "--url", "http://127.0.0.1:9"): "cannot reach",
    }.items():
        monkeypatch.setattr("sys.argv", ["evaluate", *arguments])
        assert tool.main() == 2
        assert sentence in capsys.readouterr().err
    for line, message in {
        "folder --rerank 101": "--rerank must be between 0 and 100",
        "folder --json /no/where/a.json": "--json: the folder of /no/where/a.json does not exist",
        "folder --rrf-constant -1": "--rrf-constant must not be negative",
    }.items():
        with pytest.raises(SystemExit):
            tool.parse(line.split())
        assert f"python -m tools.evaluate: error: {message}" in capsys.readouterr().err


def test_a_missing_package_is_an_error_with_the_command_that_installs_it() -> None:
    hidden = "import runpy, sys; sys.modules['pytrec_eval'] = None; "
    script = hidden + "runpy.run_module('tools.evaluate', run_name='__main__')"
    command = [sys.executable, "-c", script, "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    installs = "-m pip install --no-deps --require-hashes -r requirements/verify.lock"
    needs = "tools.evaluate needs pytrec_eval, which "
    assert done.stderr == f"{needs}'{sys.executable} {installs}' installs\n"
