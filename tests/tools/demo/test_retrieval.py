"""The demo finds the right passage by each kind of vector, also in 8 bits.

Each topic has several similar passages, 120 in all, with one question each. The fused score weighs
the three kinds equally, as FlagEmbedding does by default.
"""

from pathlib import Path

import numpy as np
import pytest

from smart_embedder.core import EngineCore
from smart_embedder.hardware.device import cpu_has_int8
from smart_embedder.requests import EmbedRequest, Outputs
from smart_embedder.results import TextEmbedding
from smart_embedder.settings import EngineSettings
from smart_embedder.startup import load_models
from tests.support.server import RunningServer, run_server
from tools.evaluate import __main__ as tool
from tools.evaluate.dataset import read_beir
from tools.evaluate.representations import Form

pytestmark = pytest.mark.long

QUESTIONS = Path(__file__).with_name("questions")
KINDS = ("dense", "sparse", "colbert")


@pytest.fixture(scope="module")
def demo(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    settings = {"EMBEDDING_MODEL": str(demo_checkpoint), "RERANKER_MODEL": "none"}
    with run_server(tmp_path_factory.mktemp("demo"), **settings, DTYPE="float32") as running:
        yield running


def test_each_kind_ranks_the_right_passage_first_and_fusion_is_not_worse_than_dense(
    demo: RunningServer,
) -> None:
    only = ";".join([*KINDS, "fused", "rrf dense+sparse"])
    rows = tool.run(tool.parse([str(QUESTIONS), "--url", demo.url, "--only", only]))
    found = {row.representation: row.figures["first"] for row in rows}
    assert min(found.values()) >= 0.7
    assert found["rrf dense+sparse"] >= found["dense"] >= 0.94
    assert found["fused"] >= 0.9


async def embed(folder: Path, dtype: str, texts: list[str]) -> list[TextEmbedding]:
    settings = EngineSettings(
        embedding_model=str(folder), reranker_model="none", device="cpu", dtype=dtype
    )
    async with EngineCore(settings, load_models) as engine:
        return (await engine.embed(EmbedRequest(texts, Outputs.of(KINDS)))).embeddings


async def test_sparse_scores_are_small_and_int8_finds_the_passages_of_float32(
    demo_checkpoint: Path,
) -> None:
    """Sparse scores are about as large as the differences of dense ones."""
    dataset = read_beir(QUESTIONS, "test")
    texts = [*list(dataset.queries.values())[:40], *list(dataset.documents.values())[:40]]
    in_float32 = await embed(demo_checkpoint, "float32", texts)
    # Each question belongs to the passage with the same index.
    scores = Form("sparse", "sparse").score(in_float32[:40], in_float32[40:]).scores
    assert 0.03 < np.median(scores.diagonal()) < 0.3
    assert np.median(scores) < 0.2 * np.median(scores.diagonal())
    if not cpu_has_int8():
        pytest.skip("needs an x86 processor with AVX2")
    in_int8 = await embed(demo_checkpoint, "int8", texts)
    for kind in KINDS:
        whole, smaller = (
            Form(kind, kind).score(vectors[:40], vectors[40:]).scores.argmax(axis=1)
            for vectors in (in_float32, in_int8)
        )
        right = np.arange(40)
        assert (smaller == right).sum() >= 0.97 * (whole == right).sum()
