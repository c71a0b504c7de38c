"""The vectors of ColBERT models beside PyLate itself, on tiny random checkpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertModel, MistralModel, Qwen3Model, XLMRobertaModel

from smart_embedder.engine.records import Outputs
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks.load import load_embedder
from tests.support.wordpiece import ROBERTA, save_colbert

CPU = torch.device("cpu")
TEXTS = [
    *["hybrid search", "memory, rank! (sea)", "rank " * 100, "!?", "unknown жизнь", ""],
    *["search sea " * length for length in (1, 5, 9, 30)],
]
GROUPED = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
KINDS = {"xlm-roberta": XLMRobertaModel, "qwen3": Qwen3Model, "mistral": MistralModel}
CASES = {
    "unattended": {},
    "attended": {"attend_to_expansion_tokens": True},
    "none": {"do_query_expansion": False},
    "without markers": {"query_prefix": "", "document_prefix": ""},
    "a skipped word that is no token": {"skiplist_words": ["rank", "nonsense"]},
    "xlm-roberta": ROBERTA | {"query_prefix": "", "document_prefix": ""},
    "qwen3": GROUPED,
    "mistral": GROUPED | {"sliding_window": 32},
}


@pytest.mark.parametrize("case", CASES)
def test_queries_and_documents_are_pylates(
    references, tmp_path: Path, tiny_reranker: Path, case
) -> None:
    kind, changes = KINDS.get(case, BertModel), dict(CASES[case])
    if case == "xlm-roberta":
        changes |= {"tokenizer_of": tiny_reranker}
    folder = save_colbert(tmp_path / "model", kind, **changes)
    target = Target(CPU, torch.float32, choose_backend(CPU, torch.float32))
    model = load_embedder("tiny-colbert", folder, 8192, target)
    sides = ("query", "document")
    ids = [each.ids for side in sides for each in model.tokenize(TEXTS, input_type=side)]
    mixed = model.forward(ids, Outputs(colbert=True))
    alone = [model.forward([each], Outputs(colbert=True))[0] for each in ids]
    expected = [vectors for side in sides for vectors in references.embed(folder, TEXTS, side)]
    for made in (mixed, alone):
        for own, vectors in zip(made, expected, strict=True):
            assert own.colbert.shape == vectors.shape
            np.testing.assert_allclose(own.colbert, vectors, rtol=0, atol=1e-5)
