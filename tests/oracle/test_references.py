"""ColBERT models compared with PyLate.

`tests/smart_embedder/test_vectors.py` compares pooling and MUVERA with recorded results.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertModel, MistralModel, Qwen3Model, XLMRobertaModel

from smart_embedder.kernels.target import Target, choose_backend
from smart_embedder.models.loader import load_embedder
from smart_embedder.requests import Outputs
from tests.oracle.references import ENVIRONMENT, MISSING, References, run_references
from tests.support.wordpiece import ROBERTA, save_colbert


@pytest.fixture(scope="module")
def references() -> Iterator[References]:
    """Run the packages."""
    if not ENVIRONMENT.is_dir():
        pytest.skip(MISSING)
    with run_references() as running:
        yield running


CPU = torch.device("cpu")
TEXTS = [
    *["hybrid search", "memory, rank! (sea)", "rank " * 100, "!?", "unknown жизнь", ""],
    *["search sea " * length for length in (1, 5, 9, 30)],
]
GROUPED = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
BARE = {"query_prefix": "", "document_prefix": ""}
CASES = {
    "unattended": (BertModel, {}),
    "attended": (BertModel, {"attend_to_expansion_tokens": True}),
    "none": (BertModel, {"do_query_expansion": False}),
    "without markers": (BertModel, BARE),
    "a skipped word that is no token": (BertModel, {"skiplist_words": ["rank", "nonsense"]}),
    "xlm-roberta": (XLMRobertaModel, ROBERTA | BARE),
    "qwen3": (Qwen3Model, GROUPED),
    "mistral": (MistralModel, GROUPED | {"sliding_window": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_colbert_queries_and_documents_equal_pylate(
    references, tmp_path: Path, tiny_reranker: Path, case
) -> None:
    kind, changes = CASES[case]
    like = tiny_reranker if kind is XLMRobertaModel else None
    folder = save_colbert(tmp_path / "model", kind, tokenizer_of=like, **changes)
    target = Target(CPU, torch.float32, choose_backend(CPU, torch.float32))
    model, colbert = load_embedder("tiny-colbert", folder, 8192, target), Outputs(colbert=True)
    sides = ("query", "document")
    ids = [text.ids for side in sides for text in model.tokenize(TEXTS, input_type=side)]
    mixed = model.forward(ids, colbert)
    alone = [model.forward([sequence], colbert)[0] for sequence in ids]
    expected = [vectors for side in sides for vectors in references.embed(folder, TEXTS, side)]
    for result, vectors in zip([*mixed, *alone], expected * 2, strict=True):
        assert result.colbert.shape == vectors.shape
        np.testing.assert_allclose(result.colbert, vectors, rtol=0, atol=1e-5)
