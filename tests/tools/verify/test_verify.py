"""`python -m tools.verify`: outputs agree with their references, and a difference is noticed."""

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


@pytest.mark.parametrize("pooling", [None, "max"])
async def test_any_dense_encoder_agrees_with_sentence_transformers(pooling, tmp_path: Path) -> None:
    folder = save_family(tmp_path / "gte", "gte", word_tokenizer())
    (row,) = await rows_of(embedding_model=str(folder), reranker_model="none", pooling=pooling)
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


async def test_a_model_without_any_sparse_weight_agrees(tiny_m3: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_m3, tmp_path / "model")
    head = torch.load(folder / "sparse_linear.pt")
    torch.save(head | {"bias": torch.full((1,), -1e4)}, folder / "sparse_linear.pt")
    rows = await rows_of(embedding_model=str(folder), reranker_model="none")
    assert len(rows) == 3
    assert all(row.agrees for row in rows)


def test_timeouts_are_raised_and_lengths_are_limited_for_the_references():
    settings = verify.limit_settings(verify.EngineSettings(gpu_process_timeout=1.0, dtype="auto"))
    assert settings.gpu_process_timeout == settings.rerank_gpu_timeout == 3600
    assert (settings.dtype, settings.embed_max_length) == ("float32", 2048)


def test_a_missing_model_is_an_error_of_one_sentence(run_verify) -> None:
    status, output = run_verify(EMBEDDING_MODEL="/no/such/model")
    assert status == 2
    assert output == "The check cannot run: the model folder /no/such/model does not exist\n"


async def test_a_wrong_vector_is_out_of_tolerance(
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
