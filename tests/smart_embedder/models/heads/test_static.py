"""Static embeddings against sentence-transformers, and model2vec's formula, on the same files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from smart_embedder.errors import StartupError
from smart_embedder.models.files.config import NO_OVERRIDES, SentenceOverrides
from smart_embedder.models.heads.static import StaticEmbedder
from smart_embedder.models.loader import load_embedder
from smart_embedder.requests import TruncationOptions
from tests.support.encoders import TEXTS, assert_close, embed, float32, word_tokenizer
from tests.support.wordpiece import change

UNKNOWN = "vector ☃ hybrid"
SAMPLES = [*TEXTS, UNKNOWN, "☃", "[CLS] search [SEP]"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return word_tokenizer()


def load(folder: Path, overrides: SentenceOverrides = NO_OVERRIDES) -> Any:
    model = load_embedder(folder.name, folder, 8192, float32(), overrides)
    assert isinstance(model, StaticEmbedder)
    return model


def save_model2vec(folder: Path, tokenizer: Tokenizer, **config: Any) -> dict[str, torch.Tensor]:
    """Save a model as model2vec does after quantizing its vocabulary."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    count = tokenizer.get_vocab_size()
    tensors = {
        "embeddings": torch.randn(50, 16),
        "mapping": torch.randint(50, (count,)),
        "weights": torch.rand(count),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec"} | config))
    return tensors


def by_formula(folder: Path, tokenizer: Tokenizer, texts: list[str], limit: int) -> np.ndarray:
    """The mean of rows by mapping and weights, without unknown tokens; zeros for no token."""
    tensors = StaticEmbedding.load(str(folder)).embedding.weight.detach()
    unknown = tokenizer.token_to_id("[UNK]")
    vectors = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:limit]
        known = [id_ for id_ in ids if id_ != unknown]
        vectors.append(tensors[known].mean(0) if known else torch.zeros(tensors.shape[1]))
    return torch.stack(vectors).numpy()


@pytest.mark.parametrize("normalizes", [False, True])
def test_static_embedding_equals_sentence_transformers(
    tmp_path: Path, tokenizer: Tokenizer, normalizes: bool
) -> None:
    module = StaticEmbedding(tokenizer, embedding_dim=24)
    torch.nn.init.normal_(module.embedding.weight)
    reference = SentenceTransformer(modules=[module, *[Normalize()] * normalizes], device="cpu")
    folder = tmp_path / "model"
    reference.save(str(folder))
    model = load(folder)
    found = embed(model, SAMPLES)
    assert_close(found, reference.encode(SAMPLES))
    assert_close(found[1], np.zeros(24))  # The empty text.
    assert_close(embed(model, SAMPLES, "query: "), reference.encode(SAMPLES, prompt="query: "))
    assert (model.dense_width, model.pooling, model.normalizes) == (24, "mean", normalizes)
    assert model.special_tokens == ([], [])


@pytest.mark.parametrize("normalize", [None, True])
def test_model2vec_folder_leaves_out_unknown_tokens(
    tmp_path: Path, tokenizer: Tokenizer, normalize: bool | None
) -> None:
    folder = tmp_path / "model"
    save_model2vec(folder, tokenizer, **({} if normalize is None else {"normalize": normalize}))
    with capture_logs() as logs:
        model = load(folder)
    assert logs == []
    expected = by_formula(folder, tokenizer, SAMPLES, 512)
    if normalize:
        norms = np.linalg.norm(expected, axis=1, keepdims=True)
        expected = np.divide(expected, norms, where=norms > 0, out=expected)
    assert_close(embed(model, SAMPLES), expected)
    assert model.normalizes == bool(normalize)
    assert not [text for text in model.tokenize(SAMPLES[:3]) if text.truncated]


@pytest.mark.parametrize(("max_length", "limit"), [(4, 4), (None, 8192)])
def test_model2vec_limit_of_tokens_is_followed(
    tmp_path: Path, tokenizer: Tokenizer, max_length, limit
) -> None:
    folder = tmp_path / "model"
    save_model2vec(folder, tokenizer, max_length=max_length)
    model = load(folder)
    assert model.max_length == limit
    assert_close(embed(model, SAMPLES), by_formula(folder, tokenizer, SAMPLES, limit))
    (cut,) = model.tokenize(["search hybrid ☃ vector"], "", TruncationOptions(max_tokens=2))
    assert (len(cut.ids), cut.truncated) == (2, True)


def test_settings_of_static_embeddings_are_followed_or_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    save_model2vec(tmp_path / "model", tokenizer)
    scaled = load(tmp_path / "model", SentenceOverrides(normalize=True))
    assert_close(np.linalg.norm(embed(scaled, ["vector"])), 1)
    with pytest.raises(StartupError, match="POOLING=cls has no effect on model, whose vectors are"):
        load(tmp_path / "model", SentenceOverrides(pooling="cls"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mapping": torch.full((700,), 50)}, "maps tokens to missing rows"),
        ({"weights": torch.ones(3)}, "has 3 weights for"),
        (
            {"mapping": torch.zeros(3, dtype=torch.int64), "weights": torch.ones(3)},
            "the table only 3",
        ),
        ({"mapping": torch.zeros(700)}, "has no integers in mapping"),
        (
            {"embeddings": torch.ones(5)},
            r"tensor embeddings: \[5\], and its configuration says \[any, any\]",
        ),
        ({"embeddings": torch.ones(50, 16, dtype=torch.int8)}, "embeddings in int8; take one in"),
        ({"scale": torch.ones(2)}, "has the tensor scale"),
    ],
)
def test_unusable_tables_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, changes, message
) -> None:
    tensors = save_model2vec(tmp_path / "model", tokenizer)
    save_file(tensors | changes, tmp_path / "model" / "model.safetensors")
    with pytest.raises(StartupError, match=message):
        load(tmp_path / "model")


def test_mapping_is_part_of_the_vector_space(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tensors = save_model2vec(tmp_path / "model", tokenizer)
    before = load(tmp_path / "model").spaces
    tensors["mapping"][7] = (tensors["mapping"][7] + 1) % 50
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    assert load(tmp_path / "model").spaces != before
    change(tmp_path / "model" / "config.json", normalize=True)
    assert load(tmp_path / "model").normalizes
