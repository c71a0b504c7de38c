"""`python -m tools.verify`: outputs agree with their references, and a difference is noticed."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import BertForMaskedLM, BertModel

from smart_embedder.results import SparseVector, TextEmbedding
from tests.support.encoders import save_family, word_tokenizer
from tests.support.wordpiece import save_colbert, save_splade
from tools.verify import parity as verify

pytestmark = pytest.mark.long


@pytest.fixture
def run_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Run the tool in this process, where the references are imported, in a folder without .env."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEVICE", "cpu")

    def run(**environment: str) -> tuple[int, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        status = verify.check()
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_all_models_agree_with_their_references(tiny_m3, tiny_reranker, run_verify) -> None:
    status, output = run_verify(EMBEDDING_MODEL=str(tiny_m3), RERANKER_MODEL=str(tiny_reranker))
    assert status == 0, output
    assert "4 of 4 outputs agree with their reference." in output
    assert re.search(r"(\d+) of \1 paths compute what the plain reference does\.", output)
    assert re.search(r"in float32: linear by \w+, .*attention by \w+\.", output)


async def rows_of(**settings: str) -> list[verify.Row]:
    """Compare the outputs, but not the paths of operations, which takes seconds."""
    return await verify.compare(
        verify.limit_settings(verify.EngineSettings(device="cpu", **settings))
    )


async def test_qwen_models_agree_with_their_references(tiny_m3: Path, tiny_qwen: Path) -> None:
    rows = await rows_of(
        embedding_model=str(tiny_m3),
        dense_embedding_model=str(tiny_qwen),
        reranker_model=str(tiny_qwen),
    )
    assert all(row.agrees for row in rows)
    packages = {row.output: row.reference for row in rows}
    assert packages == {
        "sparse": "FlagEmbedding",
        "colbert": "FlagEmbedding",
        "dense": "transformers",
        "rerank score": "transformers",
    }


async def test_any_dense_encoder_agrees_with_sentence_transformers(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "gte", "gte", word_tokenizer())
    (row,) = await rows_of(embedding_model=str(folder), reranker_model="none", pooling="max")
    assert row.agrees
    assert (row.output, row.reference) == ("dense", "sentence-transformers")


@pytest.mark.parametrize("kind", ["sparse", "colbert"])
async def test_a_model_of_one_kind_agrees(kind, tmp_path: Path) -> None:
    splade = kind == "sparse"
    save, model_class = (save_splade, BertForMaskedLM) if splade else (save_colbert, BertModel)
    model = save(tmp_path / kind, model_class)
    rows = await rows_of(embedding_model=str(model), reranker_model="late-interaction")
    assert [row.output for row in rows] == [kind, "rerank score"]
    assert all(row.agrees and row.reference == "sentence-transformers" for row in rows)


def test_timeouts_are_raised_and_lengths_are_limited_for_the_references():
    settings = verify.limit_settings(verify.EngineSettings(gpu_process_timeout=1.0, dtype="auto"))
    assert settings.gpu_process_timeout == settings.rerank_gpu_timeout == 3600
    assert (settings.dtype, settings.embed_max_length) == ("float32", 2048)


def test_a_missing_model_is_an_error_of_one_sentence(run_verify) -> None:
    status, output = run_verify(EMBEDDING_MODEL="/no/such/model")
    assert status == 2
    assert output == "The check cannot run: the model folder /no/such/model does not exist\n"


def test_a_wrong_vector_is_out_of_tolerance_and_no_sparse_weight_is_not(capsys) -> None:
    def embeddings() -> list[TextEmbedding]:
        random, empty = np.random.default_rng(1), SparseVector(np.zeros(0, int), np.zeros(0))
        return [
            TextEmbedding(random.normal(size=8), empty, random.normal(size=(2, 8)))
            for _ in verify.TEXTS
        ]

    ours, theirs = embeddings(), iter(embeddings())
    ours[3].colbert[0, 0] += 0.01
    reference = SimpleNamespace(package="a package", embed=lambda _: [next(theirs)])
    rows = list(verify.rows_of(reference, ours, 1e-4))
    assert [row.output for row in rows] == ["dense", "sparse", "colbert"]
    assert [row.output for row in rows if not row.agrees] == ["colbert"]
    verify.print_table(rows)
    assert "OUT OF TOLERANCE" in capsys.readouterr().out
    assert np.isfinite([row.difference for row in rows]).all()
