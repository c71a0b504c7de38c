"""bge-reranker's logits against FlagEmbedding's on the same files, and what is no reranker."""

import random
from pathlib import Path

import numpy as np
import pytest
from FlagEmbedding import FlagReranker
from safetensors.torch import load_file, save_file

from smart_embedder.engine.records import Outputs
from smart_embedder.errors import StartupError
from smart_embedder.models.families.backbone import Target
from smart_embedder.models.tasks.cross_encoder import CrossEncoder, load_cross_encoder
from tests.support.checkpoints import plain_corpus
from tests.support.texts import ODD_TEXTS

LIMIT = 64


@pytest.fixture(scope="module")
def folder(tiny_reranker: Path) -> Path:
    return tiny_reranker


@pytest.fixture(scope="module")
def ours(folder: Path, float32_target: Target) -> CrossEncoder:
    return load_cross_encoder("tiny", folder, LIMIT, float32_target)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> FlagReranker:
    return FlagReranker(str(folder), use_fp16=False, devices="cpu", max_length=LIMIT)


def groups() -> dict[str, list[str]]:
    """Queries and their passages: short, long, empty and in ten scripts.

    Where transformers 5 runs, FlagEmbedding turns token ids back into text and tokenises again,
    which changes unknown characters and cut words. These texts are of words that are one token.
    """
    rng = random.Random(3)
    sentences = plain_corpus(100, seed=3)
    passages = [" ".join(rng.choices(sentences, k=rng.choice([1, 1, 2, 5, 12]))) for _ in range(40)]
    long_query = " ".join(rng.choices(sentences, k=20))
    return {
        "hybrid search": [*passages, ""],
        long_query: [*passages[:20], "", "short"],
        "検索 言葉 жизнь": [*passages[:30], " "],
        "مرحبا بحث": passages[:10],
        "שלום חיפוש": passages[10:20],
    }


def test_equals_flagreranker(ours: CrossEncoder, theirs: FlagReranker) -> None:
    pairs = 0
    for query, passages in groups().items():
        tokenized = ours.tokenize_pairs(query, passages, None)
        scores = ours.forward([pair.ids for pair in tokenized], Outputs())
        expected = theirs.compute_score([(query, passage) for passage in passages], batch_size=8)
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-4)
        pairs += len(passages)
    assert pairs >= 100


def test_any_pair_has_the_layout_of_the_model_at_the_level_of_token_ids(ours) -> None:
    plain = lambda texts: [text.ids for text in ours._tokenizer.encode_plain(texts, 1000)]  # noqa: E731
    for query in ("hybrid search", *ODD_TEXTS):
        (query_ids,) = plain([query])
        for text, pair in zip(ODD_TEXTS, ours.tokenize_pairs(query, ODD_TEXTS, None), strict=True):
            head = [0, *query_ids[:48].tolist()]
            (passage,) = plain([text])
            if not len(passage):
                assert pair.ids.tolist() == [*head, 2]
                continue
            kept = passage[: LIMIT - 3 - len(head)].tolist()
            assert pair.ids.tolist() == [*head, 2, 2, *kept, 2]


@pytest.mark.parametrize(("words", "kept"), [(47, 47), (48, 48), (49, 48), (200, 48)])
def test_the_query_is_cut_to_three_quarters_first(ours: CrossEncoder, words, kept) -> None:
    (pair,) = ours.tokenize_pairs(" ".join(["search"] * words), ["vector"], None)
    assert (pair.query_tokens, pair.query_kept) == (words, kept)


@pytest.mark.parametrize(("words", "kept"), [(57, 57), (58, 58), (59, 58), (500, 58)])
def test_the_passage_is_cut_from_its_end_to_what_is_left(ours: CrossEncoder, words, kept) -> None:
    (pair,) = ours.tokenize_pairs("hybrid search", [" ".join(["vector"] * words)], None)
    assert (pair.query_kept, pair.passage_tokens, pair.passage_kept) == (2, words, kept)
    assert len(pair.ids) == min(LIMIT, words + 6)


def test_a_folder_with_an_embedding_model_is_no_reranker(tiny_m3: Path, float32_target) -> None:
    with pytest.raises(StartupError, match="holds an embedding model and not a reranker"):
        load_cross_encoder("m3", tiny_m3, LIMIT, float32_target)


def test_a_missing_layer_is_named(folder, float32_target, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights["roberta.encoder.layer.1.output.dense.bias"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match="lacks the tensor roberta.encoder.layer.1"):
        load_cross_encoder("broken", tmp_path, LIMIT, float32_target)
