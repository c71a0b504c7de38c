"""Dense vectors of Qwen3-Embedding's kind against transformers' own padded forward."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Model

from smart_embedder.engine.records import Outputs
from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint.config import SentenceOverrides
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks.dense import QWEN_END, DenseEmbedder, load_dense_embedder
from smart_embedder.models.tasks.qwen3 import DEFAULT_INSTRUCTION
from tests.support.checkpoints import save_qwen
from tests.support.encoders import reference_vectors, save_modules
from tests.support.texts import varied_texts
from tests.support.wordpiece import change
from tools.references import qwen


@pytest.fixture(scope="module")
def folder(tiny_qwen: Path) -> Path:
    return tiny_qwen


@pytest.fixture(scope="module")
def embedder(folder: Path, float32_target: Target) -> DenseEmbedder:
    return load_dense_embedder("tiny", folder, 32_768, float32_target)


def test_a_copy_of_the_published_model_has_its_pooling_prompts_and_least_width(
    embedder: DenseEmbedder,
) -> None:
    assert (embedder.pooling, embedder.min_dimensions) == ("last_token", 32)
    assert (embedder.normalizes, embedder.default_prompt) == (False, "")
    instruction = f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:"
    assert dict(embedder.prompts) == {"query": instruction, "document": ""}
    assert embedder.dense_width == 64


@pytest.mark.parametrize(
    ("name", "overrides", "pooling", "normalizes"),
    [
        ("org/tiny", SentenceOverrides(pooling="cls"), "cls", False),
        ("org/tiny", SentenceOverrides(normalize=True), "last_token", True),
        ("org/tiny", SentenceOverrides(pooling="mean", normalize=False), "mean", False),
    ],
)
def test_settings_take_the_place_of_what_a_copy_has(
    folder: Path, float32_target: Target, name: str, overrides, pooling: str, normalizes: bool
) -> None:
    embedder = load_dense_embedder(name, folder, 100, float32_target, overrides)
    assert (embedder.pooling, embedder.normalizes) == (pooling, normalizes)
    (text,) = embedder.tokenize(["search"])
    (made,) = embedder.forward([text.ids], Outputs(dense=True))
    length = np.linalg.norm(made.dense)
    assert length == pytest.approx(1, abs=1e-5) if normalizes else length > 2


def test_one_with_modules_is_scaled_only_where_a_request_asks_for_it(
    folder: Path, float32_target: Target, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    save_modules(copy, {"pooling_mode": "lasttoken"}, further=[("Normalize", {}, None)])
    embedder = load_dense_embedder("org/tiny", copy, 100, float32_target)
    assert (embedder.pooling, embedder.normalizes) == ("last_token", False)
    assert dict(embedder.prompts) == {}


@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        (["Qwen3ForSequenceClassification"], "holds a classifier: name it in RERANKER_MODEL"),
        (["Qwen3ForCausalLM"], "holds a language model"),
        (["GPT2LMHeadModel"], "holds a language model"),
        (["Qwen3Model", "Qwen3ForCausalLM"], None),
        ([], None),
        (None, None),
    ],
)
def test_a_folder_without_modules_is_an_encoder_by_its_architecture(
    architectures, message, float32_target: Target, tmp_path: Path
) -> None:
    plain = save_qwen(tmp_path / "plain", template_adds_end=False)
    change(plain / "config.json", architectures=architectures)
    if message is None:
        assert load_dense_embedder("org/tiny", plain, 100, float32_target).pooling == "mean"
    else:
        with pytest.raises(StartupError, match=message):
            load_dense_embedder("org/tiny", plain, 100, float32_target)


def test_dense_vectors_equal_the_last_token_states_of_transformers(
    embedder: DenseEmbedder, folder: Path
) -> None:
    texts = varied_texts(120)
    ours = embedder.forward([text.ids for text in embedder.tokenize(texts)], Outputs(dense=True))
    theirs = qwen.QwenEmbedding(folder, 32_768).states(texts)
    np.testing.assert_allclose([each.dense for each in ours], theirs, rtol=0, atol=1e-5)


def test_a_text_beside_others_gets_the_states_that_it_asks_for_and_gets_alone(
    embedder: DenseEmbedder, folder: Path
) -> None:
    """Beginnings that texts share are computed once."""
    texts = [f"search hybrid vector {text}" for text in varied_texts(30)]
    ids = [text.ids for text in embedder.tokenize(texts)]
    kinds = [Outputs(states=True), Outputs(dense=True), Outputs(dense=True, states=True)]
    asked = [kinds[index % 3] for index in range(len(ids))]
    together = embedder.launch(ids, asked)()
    model = Qwen3Model.from_pretrained(folder, dtype=torch.float32)
    for own, outputs, embedding in zip(ids, asked, together, strict=True):
        with torch.no_grad():
            theirs = model(torch.tensor([own.tolist()])).last_hidden_state[0].numpy()
        assert (embedding.dense is not None, embedding.states is not None) == (
            outputs.dense,
            outputs.states,
        )
        if outputs.states:
            np.testing.assert_allclose(embedding.states, theirs, rtol=0, atol=1e-4)
        if outputs.dense:
            np.testing.assert_allclose(embedding.dense, theirs[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("words", [18, 19, 20, 60])
def test_exactly_one_end_token_closes_a_text_also_after_the_cut(
    folder: Path, float32_target: Target, words: int
) -> None:
    cut = load_dense_embedder("tiny", folder, 20, float32_target)
    text = " ".join(["search"] * words)
    (tokenized,) = cut.tokenize([text])
    (whole,) = load_dense_embedder("tiny", folder, 32_768, float32_target).tokenize([text])
    end = cut._tokenizer.token_id(QWEN_END)
    assert tokenized.ids.tolist() == [*whole.ids[:-1][:19].tolist(), end]
    assert tokenized.ids.tolist().count(end) == 1
    assert tokenized.original_tokens == len(whole.ids)


@pytest.mark.parametrize("template_adds_end", [False, True])
@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_vectors_of_a_configured_model_are_those_of_sentence_transformers(
    tmp_path: Path, float32_target: Target, template_adds_end, pooling
) -> None:
    """Only the published model's texts are closed with a token that its tokenizer does not add."""
    made = save_qwen(tmp_path / "made", template_adds_end=template_adds_end)
    save_modules(made, {"pooling_mode": pooling}, prompts={"prompts": {"query": "search "}})
    embedder = load_dense_embedder("org/tiny", made, 32_768, float32_target)
    texts = list(filter(None, varied_texts(30)))  # Theirs reads no text without a token.
    ours = embedder.forward([text.ids for text in embedder.tokenize(texts)], Outputs(dense=True))
    theirs = reference_vectors(made, texts)
    np.testing.assert_allclose([each.dense for each in ours], theirs, rtol=0, atol=1e-5)
    assert embedder.prompts == {"query": "search "}
    named = load_dense_embedder("Qwen/Qwen3-Embedding-0.6B", made, 100, float32_target)
    (text,) = named.tokenize(["hybrid search"])
    end = named._tokenizer.token_id(QWEN_END)
    assert text.ids.tolist().count(end) == 1
    assert text.ids[-1] == end


def test_a_language_model_makes_no_vectors_without_a_pooling(
    tmp_path: Path, float32_target: Target
) -> None:
    plain = save_qwen(tmp_path / "plain", template_adds_end=False)
    with pytest.raises(StartupError, match="holds a language model, .* set POOLING"):
        load_dense_embedder("org/tiny", plain, 100, float32_target)
    mean = SentenceOverrides(pooling="mean")
    embedder = load_dense_embedder("org/tiny", plain, 100, float32_target, mean)
    assert (embedder.pooling, dict(embedder.prompts)) == ("mean", {})
