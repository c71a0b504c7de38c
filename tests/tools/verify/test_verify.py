"""`python -m tools.verify` as a user runs it: parity proved, and a difference noticed."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertForMaskedLM, BertModel

from smart_embedder.results import EmbeddingResult
from tests.support.encoders import save_family, word_tokenizer
from tests.support.wordpiece import save_colbert, save_splade
from tools.verify import parity as verify


@pytest.fixture
def run_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Run it in this process, which has the references imported, in a folder without .env."""
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
    """What it compares, without the paths of operations, which take seconds."""
    return await verify.compare(verify.comparable(verify.EngineSettings(device="cpu", **settings)))


async def test_qwen_models_agree_with_theirs(tiny_m3: Path, tiny_qwen: Path) -> None:
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


@pytest.mark.parametrize("pooling", [None, "max"])
async def test_any_dense_encoder_agrees_with_sentence_transformers(pooling, tmp_path: Path) -> None:
    folder = save_family(tmp_path / "gte", "gte", word_tokenizer())
    (row,) = await rows_of(embedding_model=str(folder), reranker_model="none", pooling=pooling)
    assert row.agrees
    assert (row.output, row.reference) == ("dense", "sentence-transformers")


@pytest.mark.parametrize("kind", ["sparse", "colbert"])
async def test_a_model_of_one_kind_agrees(kind, tmp_path: Path) -> None:
    splade = kind == "sparse"
    save, of = (save_splade, BertForMaskedLM) if splade else (save_colbert, BertModel)
    model = save(tmp_path / kind, of)
    rows = await rows_of(embedding_model=str(model), reranker_model="late-interaction")
    assert [row.output for row in rows] == [kind, "rerank score"]
    assert all(row.agrees and row.reference == "sentence-transformers" for row in rows)


async def test_a_model_that_weighs_no_token_agrees(tiny_m3: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_m3, tmp_path / "model")
    head = torch.load(folder / "sparse_linear.pt")
    torch.save(head | {"bias": torch.full((1,), -1e4)}, folder / "sparse_linear.pt")
    rows = await rows_of(embedding_model=str(folder), reranker_model="none")
    assert len(rows) == 3
    assert all(row.agrees for row in rows)


def test_nothing_is_cut_off_by_a_limit_of_time_and_texts_are_cut_as_references_can_read_them():
    settings = verify.comparable(verify.EngineSettings(gpu_process_timeout=1.0, dtype="auto"))
    assert settings.gpu_process_timeout == settings.rerank_gpu_timeout == 3600
    assert (settings.dtype, settings.embed_max_length) == ("float32", 2048)


def test_a_model_that_is_not_there_is_one_sentence(run_verify) -> None:
    status, output = run_verify(EMBEDDING_MODEL="/no/such/model")
    assert status == 2
    assert output == "The check cannot run: the model folder /no/such/model does not exist\n"


async def test_a_wrong_number_is_out_of_tolerance(
    tiny_m3: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    embed = verify.EngineCore.embed

    async def wrong(engine: verify.EngineCore, texts: list[str]) -> EmbeddingResult:
        result = await embed(engine, texts)
        result.embeddings[3].colbert[0, 0] += 0.01
        return result

    monkeypatch.setattr(verify.EngineCore, "embed", wrong)
    rows = await rows_of(embedding_model=str(tiny_m3), reranker_model="none")
    assert [row.output for row in rows if not row.agrees] == ["colbert"]
    verify.print_table(rows)
    assert "OUT OF TOLERANCE" in capsys.readouterr().out
    assert torch.isfinite(torch.tensor([row.difference for row in rows])).all()
