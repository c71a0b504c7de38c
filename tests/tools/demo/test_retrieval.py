"""The demo finds the right passage by each kind of vector, in 8 bits if the processor has them.

Each topic has several similar passages, 120 in all, with one question each. The fused score weighs
the three kinds equally, as FlagEmbedding does by default.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from smart_embedder.core import EngineCore
from smart_embedder.hardware.device import cpu_has_int8
from smart_embedder.requests import EmbedRequest, Outputs
from smart_embedder.settings import EngineSettings
from smart_embedder.startup import load_models
from tools.evaluate.dataset import read_beir
from tools.evaluate.evaluation import Plan, evaluate
from tools.evaluate.representations import KINDS, RRF_WEIGHTS, Form, all_representations

pytestmark = pytest.mark.long


async def test_each_kind_ranks_the_right_passage_first_and_fusion_is_not_worse_than_dense(
    demo_checkpoint: Path,
) -> None:
    dataset = read_beir(Path(__file__).with_name("questions"), "test")
    texts = [*dataset.queries.values(), *dataset.documents.values()]
    settings = EngineSettings(
        embedding_model=str(demo_checkpoint),
        reranker_model="none",
        device="cpu",
        dtype="int8" if cpu_has_int8() else "float32",
    )
    async with EngineCore(settings, load_models) as engine:
        embeddings = (await engine.embed(EmbedRequest(texts, Outputs.of(KINDS)))).embeddings
    by_text = dict(zip(texts, embeddings, strict=True))
    models = SimpleNamespace(embed=lambda texts, *_: [by_text[text] for text in texts])
    names = {*KINDS, "fused", "rrf dense+sparse"}
    compared = [item for item in all_representations(frozenset(KINDS)) if item.name in names]
    weights = dict(zip(KINDS, RRF_WEIGHTS, strict=True))
    rows = evaluate(models, dataset, Plan(compared, 0, "dense", 0, weights))
    found = {row.representation: row.figures["first"] for row in rows}
    assert found.keys() == names
    assert min(found.values()) >= 0.7
    assert found["rrf dense+sparse"] >= found["dense"] >= 0.94
    assert found["fused"] >= 0.9
    # Sparse scores are about as large as the differences of dense ones. Each question belongs to
    # the passage with the same index.
    scores = Form("sparse", "sparse").score(embeddings[:40], embeddings[120:160]).scores
    assert 0.03 < np.median(scores.diagonal()) < 0.3
    assert np.median(scores) < 0.2 * np.median(scores.diagonal())
