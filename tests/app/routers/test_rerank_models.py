"""POST /rerank with rerankers of MODELS of several kinds: order and scores of their references."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DebertaV2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from smart_embedder.models_file import read_model_entries
from tests.app.conftest import answered, serving
from tests.smart_embedder.models.rerankers.test_modules import save_modular
from tests.support.checkpoints import corpus, save_byte_level_tokenizer, spread_weights
from tests.support.wordpiece import save_model

QUERY, TASK = "hybrid search?", "Find the recipe"
PASSAGES = [*corpus(6, seed=5), "hybrid search vector", "memory."]


def save_causal(folder: Path) -> Path:
    """Save a language model of the architecture of ctxl-rerank-v2."""
    folder.mkdir()
    size = save_byte_level_tokenizer(folder, ("yes", "no"), template_adds_end=False)
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=size, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=96, max_position_embeddings=2048,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    spread_weights(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rerankers")
    classifier = save_model(
        folder / "deberta",
        DebertaV2ForSequenceClassification,
        num_labels=1,
        relative_attention=True,
    )
    modular = save_modular(folder, "cls")
    return {"modular": modular, "deberta": classifier, "causal": save_causal(folder / "causal")}


@pytest.fixture(scope="module")
def client(tiny_m3: Path, folders, tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "models.yaml"
    entries = [
        f"- name: {path}\n  task: rerank\n  aliases: [{name}]" for name, path in folders.items()
    ]
    file.write_text("\n".join([*entries, "  kind: ctxl-rerank-v2\n"]))
    with serving(embedding_model=str(tiny_m3), models=read_model_entries(file)) as client:
        yield client


def reference_scores(name: str, folder: Path, instruction: str | None) -> np.ndarray:
    if name != "causal":
        reference = CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity())
        return reference.predict([(QUERY, passage) for passage in PASSAGES])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    told, scores = "" if instruction is None else f" {instruction}", []
    for passage in PASSAGES:
        prompt = (
            "Check whether a given document contains information helpful to answer the query.\n"
            f"<Document> {passage}\n<Query> {QUERY}{told} ??"
        )
        with torch.inference_mode():
            logits = model(**tokenizer(prompt, return_tensors="pt")).logits
        scores.append(logits[0, -1, 0].item())
    return np.array(scores)


@pytest.mark.parametrize(
    ("name", "instruction"),
    [("modular", None), ("deberta", None), ("causal", None), ("causal", TASK)],
)
def test_rerank_has_the_order_and_the_scores_of_the_reference(
    client, folders, name: str, instruction: str | None
) -> None:
    body = {"query": QUERY, "passages": PASSAGES, "model": name, "instruction": instruction}
    results = answered(client, "/rerank", **body)["results"]
    expected = reference_scores(name, folders[name], instruction)
    assert [item["index"] for item in results] == np.argsort(-expected).tolist()
    scores = [item["score"] for item in results]
    np.testing.assert_allclose(scores, np.sort(expected)[::-1], rtol=0, atol=1e-5)
    assert np.ptp(expected) > 1e-3


@pytest.mark.parametrize("name", ["modular", "deberta"])
def test_instruction_for_a_reranker_that_reads_none_is_refused(client, name: str) -> None:
    body = {"query": QUERY, "passages": PASSAGES, "model": name, "instruction": TASK}
    refused = client.post("/rerank", json=body)
    assert refused.status_code == 422
    assert "instruction has no effect with the reranker" in refused.text
