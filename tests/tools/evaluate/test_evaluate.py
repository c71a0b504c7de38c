"""`python -m tools.evaluate` as a user runs it: quality in every form, beside the reference."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import BertForMaskedLM, BertModel

from tests.support.server import REPOSITORY, RunningServer, run_server
from tests.support.wordpiece import save_colbert, save_splade
from tools import references
from tools.evaluate import __main__ as tool
from tools.evaluate.evaluation import Evaluation

pytestmark = pytest.mark.long


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run it in a folder without .env."""
    monkeypatch.chdir(tmp_path)
    settings = {"DEVICE": "cpu", "DTYPE": "float32", "RERANKER_MODEL": "late-interaction"}

    def run_tool(*arguments: str | Path, **environment: str | Path) -> list[Evaluation]:
        for name, value in (settings | environment).items():
            monkeypatch.setenv(name, str(value))
        return asyncio.run(tool.run(tool.parse(list(map(str, arguments)))))

    return run_tool


def ndcg(evaluation: Evaluation) -> dict[str, float]:
    return {row.representation: row.quality.ndcg_10 for row in evaluation.rows}


def test_the_demo_finds_its_passages_in_every_form(
    demo_checkpoint: Path, few_questions, run, tmp_path: Path, capsys
) -> None:
    file = tmp_path / "figures.json"
    (ours,) = run(
        few_questions(16), "--rerank", "2", "--json", file, EMBEDDING_MODEL=demo_checkpoint
    )
    found = ndcg(ours)
    names = [each.name for each in tool.all_representations(frozenset(tool.KINDS))]
    assert list(found) == [*names, "dense, reranked"]
    assert all(value > 0.8 for value in found.values())
    assert found["colbert, pooled by 2, int8"] >= 0.99 * found["colbert"]
    assert found["muvera, best by colbert"] == pytest.approx(found["colbert"], abs=1e-3)
    assert all(row.quality.recall_100 > 0.99 for row in ours.rows)
    printed = capsys.readouterr().out
    assert "few-questions: 16 documents, 16 queries." in printed
    assert f"{found['fused']:.4f}" in printed
    # 16 passages that every form finds: a table of noise says so.
    assert printed.count("no difference shown") >= len(names) // 2
    told = json.loads(file.read_text())
    assert told["documents"] == told["queries"] == 16
    (same,) = told["evaluations"]
    assert [row["quality"]["ndcg_10"] for row in same["rows"]] == list(found.values())
    assert all(value is not None for value in same["speed"].values())


def test_the_reference_finds_the_same(demo_checkpoint: Path, few_questions, run, capsys) -> None:
    ours, theirs = run(
        few_questions(4), "--reference", "--rerank", "2", EMBEDDING_MODEL=demo_checkpoint
    )
    every = tool.all_representations(frozenset(tool.KINDS))
    basic = (*(each.name for each in every if each.basic), "dense, reranked")
    assert tuple(ndcg(theirs)) == basic
    assert {name: ndcg(ours)[name] for name in basic} == pytest.approx(ndcg(theirs), abs=1e-6)
    assert theirs.speed.tokens_per_second is None
    assert "nDCG@10 of the reference" in capsys.readouterr().out


def test_a_qwen_model_is_compared_with_transformers_and_has_fewer_dimensions(
    tiny_m3: Path, tiny_qwen: Path, few_questions, run
) -> None:
    models = {"DENSE_EMBEDDING_MODEL": tiny_qwen, "RERANKER_MODEL": tiny_qwen}
    ours, theirs = run(
        *(few_questions(2), "--reference", "--only", "dense; fused; dense, 32 dimensions, int8"),
        *("--rerank", "2", "--query-prompt", "Instruct: find it\nQuery: "),
        EMBEDDING_MODEL=tiny_m3,
        **models,
    )
    found = ndcg(ours)
    found.pop("dense, 32 dimensions, int8")
    assert found == pytest.approx(ndcg(theirs), abs=1e-6)
    sizes = {row.representation: row.bytes_per_document for row in ours.rows}
    assert (sizes["dense"], sizes["dense, 32 dimensions, int8"]) == (64 * 4, 32 + 4)


@pytest.fixture(scope="module")
def one_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that make sparse or ColBERT vectors alone."""
    root = tmp_path_factory.mktemp("one-kind")
    return {
        "sparse": save_splade(root / "splade", BertForMaskedLM),
        "colbert": save_colbert(root / "colbert", BertModel),
    }


def test_a_colbert_model_reads_queries_as_such_without_being_asked_to(
    one_kind: dict[str, Path], few_questions, run
) -> None:
    model = {"EMBEDDING_MODEL": one_kind["colbert"]}
    ours, theirs = run(few_questions(4), "--reference", "--rerank", "2", **model)
    assert all(name.startswith(("colbert", "muvera")) for name in ndcg(ours))
    basic = {name: ndcg(ours)[name] for name in ("colbert", "colbert, reranked")}
    assert basic == ndcg(theirs)
    assert len({*basic.values()}) == 1


def test_kinds_of_two_models_are_fused(
    one_kind: dict[str, Path], tiny_qwen: Path, few_questions, run
) -> None:
    models = {"EMBEDDING_MODEL": one_kind["sparse"], "DENSE_EMBEDDING_MODEL": tiny_qwen}
    arguments = (few_questions(3), "--reference", "--only", "dense; sparse; fused")
    ours, theirs = run(*arguments, RERANKER_MODEL="none", **models)
    assert ours.rows == theirs.rows
    assert list(ndcg(ours)) == ["dense", "sparse", "fused"]


def test_without_a_reference_the_own_figures_are_printed(
    one_kind: dict[str, Path], few_questions, run, monkeypatch, capsys
) -> None:
    monkeypatch.delitem(sys.modules, "tools.references.sentence", raising=False)
    monkeypatch.delattr(references, "sentence", raising=False)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    arguments = (few_questions(2), "--reference", "--rerank", "0")
    (ours,) = run(*arguments, EMBEDDING_MODEL=one_kind["sparse"])
    printed = capsys.readouterr()
    assert "left out: the reference needs sentence-transformers, which '" in printed.err
    assert "pip install --no-deps --require-hashes -r requirements/verify.lock'" in printed.err
    assert f"{ndcg(ours)['sparse']:.4f}" in printed.out


def test_a_service_finds_what_the_engine_finds(
    tiny_m3: Path, server: RunningServer, few_questions, run
) -> None:
    folder = few_questions(4)
    (engine,) = run(folder, "--rerank", "0", EMBEDDING_MODEL=tiny_m3)
    (service,) = run(folder, "--rerank", "0", "--url", server.url)
    assert ndcg(service) == pytest.approx(ndcg(engine), abs=1e-6)
    sizes = [[row.bytes_per_document for row in each.rows] for each in (service, engine)]
    assert sizes[0] == sizes[1]
    (dense,) = run(folder, "--rerank", "0", "--url", server.url, "--kinds", "dense")
    assert all(name.startswith("dense") for name in ndcg(dense))
    assert dense.speed.pairs_per_second is None
    with pytest.raises(tool.ServiceError, match="cannot reach"):
        run(folder, "--url", "http://127.0.0.1:9")


def test_models_beside_the_default_ones_find_what_they_find_alone(
    one_kind: dict[str, Path], tiny_m3: Path, tiny_reranker: Path, few_questions, run, tmp_path
) -> None:
    folder = few_questions(4)
    models = f"- name: {one_kind['sparse']}\n- {{name: {tiny_reranker}, task: rerank}}\n"
    (tmp_path / "models.yaml").write_text(models, "utf-8")
    alone = {"EMBEDDING_MODEL": one_kind["sparse"], "RERANKER_MODEL": tiny_reranker}
    (engine,) = run(folder, "--rerank", "2", **alone)
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "RERANKER_MODEL": "none", "DTYPE": "float32"}
    with run_server(tmp_path, MODELS="models.yaml", **settings) as server:
        names = ("--model", one_kind["sparse"].name, "--reranker", tiny_reranker.name)
        (service,) = run(folder, "--rerank", "2", "--url", server.url, *names)
    assert ndcg(service) == pytest.approx(ndcg(engine), abs=1e-6)
    assert "sparse, reranked" in ndcg(service)


def test_a_missing_data_set_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["evaluate", "nowhere"])
    assert tool.main() == 2
    assert "corpus.jsonl is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "dense,colour"], "'colour' is no kind of vector that is made: colbert; dense"),
        (["--kinds", "dense", "--only", "sparse"], "'sparse' is no representation"),
        (["--only", "dense", "--candidates", "fused"], "'fused' is no representation that"),
        (["--only", "dense", "--baseline", "sparse"], "'sparse' is no representation that"),
    ],
)
def test_a_name_that_is_not_known_is_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(tool.DatasetError, match=message):
        tool.plan_of(tool.parse(["folder", *arguments]), tool.Made(frozenset(tool.KINDS)))


def test_a_prompt_is_not_for_a_model_with_markers() -> None:
    made, prompted = tool.Made(frozenset({"colbert", "dense"})), ["folder", "--query-prompt", "a"]
    with pytest.raises(tool.DatasetError, match="not for a ColBERT model"):
        tool.plan_of(tool.parse(prompted), made)
    plan = tool.plan_of(tool.parse([*prompted, "--kinds", "dense"]), made)
    assert plan.query_options.prompt == "a"


def test_queries_are_told_from_documents_where_the_model_reads_them_differently(
    tiny_qwen: Path, few_questions, run, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_qwen, tmp_path / "model")
    prompts = {"prompts": {"query": "Find this: ", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    asked = (few_questions(6), "--rerank", "0", "--only", "dense")
    model = {"EMBEDDING_MODEL": folder, "RERANKER_MODEL": "none"}
    (typed,) = run(*asked, "--input-types", **model)
    (prompted,) = run(*asked, "--query-prompt", "Find this: ", **model)
    assert typed.rows == prompted.rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "name a folder, or a task with --mteb"),
        ("folder --rerank 101", "--rerank must be between 0 and 100"),
        ("folder --json /no/where/a.json", "--json: the folder of /no/where/a.json does not exist"),
        ("folder --rrf-constant -1", "--rrf-constant must not be negative"),
        ("folder --weights dense=0", "argument --weights: invalid read_weights value: 'dense=0'"),
        ("folder --weights words=1", "argument --weights: invalid read_weights value: 'words=1'"),
        ("folder --input-types --query-prompt a", "--input-types does not go with --query-prompt"),
        ("folder --model one", "--model and --reranker need --url"),
        ("folder --model one --url http://127.0.0.1:9 --reference", "--reference is of the models"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: str, message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        tool.parse(arguments.split())
    assert f"python -m tools.evaluate: error: {message}" in capsys.readouterr().err


def test_without_its_packages_it_names_the_command_that_installs_them() -> None:
    hidden = "import runpy, sys; sys.modules['pytrec_eval'] = None; "
    script = hidden + "runpy.run_module('tools.evaluate', run_name='__main__')"
    command = [sys.executable, "-c", script, "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    installs = "-m pip install --no-deps --require-hashes -r requirements/verify.lock"
    needs = "tools.evaluate needs pytrec_eval, which "
    assert done.stderr == f"{needs}'{sys.executable} {installs}' installs\n"
