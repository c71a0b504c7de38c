"""Dense encoders, compared with sentence-transformers on the same files in float32."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from transformers import GteConfig, GteForTokenClassification

from smart_embedder.errors import StartupError
from smart_embedder.models.files.config import NO_OVERRIDES, SentenceOverrides
from smart_embedder.models.heads.dense import DEFAULT_INSTRUCTION, QWEN_END, DenseEmbedder
from smart_embedder.models.loader import load_embedder
from smart_embedder.requests import Outputs
from tests.support.checkpoints import (
    changed_json,
    corpus,
    minilm_folder,
    save_qwen,
)
from tests.support.encoders import (
    TEXTS,
    WIDTH,
    assert_close,
    dense,
    embed,
    float32,
    load,
    reference,
    reference_vectors,
    save_family,
    save_modules,
    word_tokenizer,
)
from tests.support.texts import varied_texts
from tests.support.wordpiece import change

NORMALIZE = ("Normalize", {}, None)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A model that is not changed; tests configure a copy of it."""
    return save_family(tmp_path_factory.mktemp("dense") / "bert", "bert", word_tokenizer())


@pytest.fixture
def copy(bert: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bert, tmp_path / "copy")


def residual(out_features: int) -> tuple:
    kind, config, layer = dense(out_features, "Tanh")
    return kind, config | {"use_residual": True}, layer


def layer_norm(width: int) -> tuple:
    layer = torch.nn.LayerNorm(width)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    return "LayerNorm", {"dimension": width}, layer


def pooled(**modes: bool) -> dict:
    return {"pooling": {"pooling_mode_mean_tokens": False} | modes}


def behind(*further: tuple) -> dict:
    return {"further": further}


NEWER = {"embedding_dimension": WIDTH}
CONFIGURED = {
    "no pooling": pooled(),
    "mean by the root of the length": pooled(pooling_mode_mean_sqrt_len_tokens=True),
    "weighted mean": pooled(pooling_mode_weightedmean_tokens=True),
    "first token and mean": pooled(pooling_mode_cls_token=True, pooling_mode_mean_tokens=True),
    "by newer names": {"pooling": NEWER | {"pooling_mode": ["max", "lasttoken"]}},
    "projected and normalised": behind(dense(80, "GELU", bias=False), NORMALIZE),
    "projected twice": behind(dense(WIDTH, "ReLU"), dense(24, "Sigmoid"), NORMALIZE),
    "normalised and projected": behind(NORMALIZE, dense(16, "SiLU")),
    "residual": behind(("Dropout", {"dropout": 0.1}, None), residual(WIDTH)),
    "layer norm": behind(layer_norm(WIDTH), dense(16, "SiLU"), layer_norm(16)),
    "in small letters": {"texts": {"max_seq_length": 20, "do_lower_case": True}},
    "cut to 16": behind(NORMALIZE) | {"prompts": {"truncate_dim": 16}},
    "cut to more": behind(NORMALIZE) | {"prompts": {"truncate_dim": 1000}},
}


@pytest.mark.parametrize("configured", CONFIGURED.values(), ids=CONFIGURED)
def test_dense_configurations_equal_sentence_transformers(configured, copy) -> None:
    save_modules(copy, **configured)
    model, texts = load(copy), [*TEXTS, "HYBRID Search", " ".join(corpus(9))]
    vectors, expected = embed(model, texts), reference(copy).encode(texts)
    # Divided by the root of its length only, the vector of a long text has large numbers.
    scale = max(1.0, np.abs(expected).max())
    assert_close(vectors / scale, expected / scale)
    assert model.dense_width == vectors.shape[1]
    assert model.max_length == configured.get("texts", {}).get("max_seq_length", 200)
    if "prompts" not in configured:
        last = configured.get("further", [(None,)])[-1]
        assert model.normalizes == (last[0] == "Normalize")


def test_published_model_starts_without_a_warning_and_equals_sentence_transformers() -> None:
    """all-MiniLM-L6-v2 with its trained weights; its file has position_ids, which no one reads."""
    folder = minilm_folder()
    with capture_logs() as logs:
        model = load(folder)
    assert logs == []
    assert_close(embed(model, TEXTS), reference(folder).encode(TEXTS))


def test_pooling_setting_overrides_the_configuration(copy) -> None:
    overrides = SentenceOverrides(pooling="cls")
    named = embed(load(copy, overrides=overrides), TEXTS)
    save_modules(copy, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    assert_close(named, reference(copy).encode(TEXTS))


@pytest.mark.parametrize(
    ("normalize", "further"), [(True, []), (False, [dense(24, "Tanh"), NORMALIZE])]
)
def test_normalize_setting_overrides_the_configuration(normalize, further, copy) -> None:
    save_modules(copy, further=further)
    model = load(copy, overrides=SentenceOverrides(normalize=normalize))
    unscaled = [module for module in further if module[0] != "Normalize"]
    save_modules(copy, further=[*unscaled, NORMALIZE] if normalize else unscaled)
    assert_close(embed(model, TEXTS), reference(copy).encode(TEXTS))
    assert model.normalizes == normalize


def test_prompt_settings_override_the_configuration(copy, tiny_m3: Path) -> None:
    configured = {"query": "ask: ", "passage": "text: ", "other": "o: "}
    (copy / "config_sentence_transformers.json").write_text(json.dumps({"prompts": configured}))
    overrides = SentenceOverrides(query_prompt="query: ", document_prompt="")
    model = load(copy, overrides=overrides)
    assert dict(model.prompts) == configured | {"query": "query: ", "document": ""}
    m3 = load_embedder("m3", tiny_m3, 512, float32(), SentenceOverrides(query_prompt="q: "))
    assert dict(m3.prompts) == {"query": "q: "}


@pytest.mark.parametrize("setting", [{"pooling": "cls"}, {"normalize": True}])
def test_setting_without_effect_stops_the_start(setting, tiny_m3: Path) -> None:
    with pytest.raises(
        StartupError, match=r"=(cls|true) has no effect on m3, which is of bge-m3's"
    ):
        load_embedder("m3", tiny_m3, 512, float32(), SentenceOverrides(**setting))


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ([dense(8, "Tanh"), dense(8, "Tanh")], "takes 64 numbers, and there are 8"),
        ([(*dense(8, "Tanh")[:2], None)], "the weights in .*2_Dense cannot be loaded"),
    ],
)
def test_invalid_dense_projections_are_refused(further, message, copy) -> None:
    save_modules(copy, further=further)
    with pytest.raises(StartupError, match=message) as caught:
        load(copy)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def embedder(tiny_qwen: Path) -> DenseEmbedder:
    return DenseEmbedder("tiny", tiny_qwen, 32_768, float32())


def test_copy_of_qwen3_embedding_has_its_pooling_prompts_and_min_dimensions(
    embedder: DenseEmbedder,
) -> None:
    assert (embedder.pooling, embedder.min_dimensions) == ("last_token", 32)
    assert (embedder.normalizes, embedder.default_prompt) == (False, "")
    instruction = f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:"
    assert dict(embedder.prompts) == {"query": instruction, "document": ""}
    assert embedder.dense_width == 64


def save_published_qwen3(folder: Path, *, template_adds_end: bool) -> Path:
    """Save a model with the configuration of Qwen3-Embedding."""
    save_qwen(folder, template_adds_end=template_adds_end)
    prompts = {"query": f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:", "document": ""}
    pooling = {"pooling_mode": "lasttoken"}
    return save_modules(folder, pooling, [NORMALIZE], prompts={"prompts": prompts})


@pytest.mark.parametrize("template_adds_end", [False, True])
def test_published_qwen3_embedding_leaves_normalization_to_requests(
    tmp_path: Path, template_adds_end: bool
) -> None:
    """It is known by its configuration, and each text ends in one token in every revision."""
    folder = save_published_qwen3(tmp_path / "any-name", template_adds_end=template_adds_end)
    embedder = load(folder)
    assert (embedder.pooling, embedder.normalizes) == ("last_token", False)
    (text,) = embedder.tokenize(["hybrid search"])
    end = embedder._tokenizer.token_id(QWEN_END)
    assert text.ids.tolist().count(end) == 1
    assert text.ids[-1] == end
    scaled = load(folder, overrides=SentenceOverrides(normalize=True))
    if template_adds_end:
        assert_close(embed(scaled, TEXTS), reference_vectors(folder, TEXTS))


@pytest.mark.parametrize(
    "changes", [{"architectures": ["Qwen3Model"]}, {"architectures": ["Qwen3ForCausalLM"]}]
)
def test_qwen3_that_was_trained_further_follows_its_modules(tmp_path: Path, changes: dict) -> None:
    folder = save_published_qwen3(tmp_path / "Qwen3-Embedding-0.6B", template_adds_end=True)
    change(folder / "config.json", **changes)
    if changes["architectures"] == ["Qwen3ForCausalLM"]:
        change(folder / "config_sentence_transformers.json", prompts={"query": "find: "})
    embedder = load(folder)
    assert embedder.normalizes
    assert_close(embed(embedder, TEXTS), reference_vectors(folder, TEXTS))


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_transformer_may_lie_in_a_folder_of_its_own(tmp_path, family) -> None:
    """Older versions of sentence-transformers saved `0_Transformer`."""
    folder = save_family(tmp_path / "model", family, word_tokenizer())
    save_modules(folder, further=[dense(32, "Tanh"), NORMALIZE], texts={"max_seq_length": 20})
    before = load(folder)
    inner = folder / "0_Transformer"
    inner.mkdir()
    for path in filter(Path.is_file, list(folder.iterdir())):
        if path.name != "modules.json":
            path.rename(inner / path.name)
    with changed_json(folder / "modules.json") as modules:
        modules[0]["path"] = "0_Transformer"
    model = load(folder)
    assert_close(embed(model, TEXTS), reference(folder).encode(TEXTS))
    assert model.max_length == 20
    assert model.spaces == before.spaces


def test_another_similarity_is_a_warning_that_names_it(copy) -> None:
    (copy / "config_sentence_transformers.json").write_text('{"similarity_fn_name": "euclidean"}')
    with capture_logs() as logs:
        assert load(copy).similarity == "euclidean"
    (detail,) = [log["detail"] for log in logs if log["event"] == "similarity_not_used"]
    assert "the model names the similarity euclidean" in detail


def test_pooling_by_default_is_a_warning_that_names_the_setting(copy) -> None:
    (copy / "modules.json").unlink()
    shutil.rmtree(copy / "1_Pooling")
    for overrides, expected in ((NO_OVERRIDES, 1), (SentenceOverrides(pooling="cls"), 0)):
        with capture_logs() as logs:
            load(copy, overrides=overrides)
        details = [log["detail"] for log in logs if log["event"] == "pooling_by_default"]
        assert len(details) == expected
        assert all("set POOLING" in detail for detail in details)


@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        (["Qwen3ForSequenceClassification"], "holds a classifier: name it in RERANKER_MODEL"),
        (["GPT2LMHeadModel"], "holds a language model, .* set POOLING"),
        (["Qwen3Model", "Qwen3ForCausalLM"], None),
        (None, None),
    ],
)
def test_folder_without_modules_is_an_encoder_by_its_architecture(
    architectures, message, copy, tmp_path: Path
) -> None:
    (copy / "modules.json").unlink()
    shutil.rmtree(copy / "1_Pooling")
    decoder = save_qwen(tmp_path / "plain", template_adds_end=False)
    for plain in (copy, decoder):
        change(plain / "config.json", architectures=architectures)
        with pytest.raises(StartupError, match=message) if message else nullcontext():
            assert DenseEmbedder("org/tiny", plain, 100, float32()).pooling == "mean"


@pytest.mark.parametrize("words", [19, 20])
def test_exactly_one_end_token_closes_a_text_also_after_truncation(
    embedder: DenseEmbedder, tiny_qwen: Path, words: int
) -> None:
    text = " ".join(["search"] * words)
    (cut,) = DenseEmbedder("tiny", tiny_qwen, 20, float32()).tokenize([text])
    (whole,) = embedder.tokenize([text])
    end = embedder._tokenizer.token_id(QWEN_END)
    assert cut.ids.tolist() == [*whole.ids[:-1][:19].tolist(), end]
    assert cut.ids.tolist().count(end) == 1
    assert cut.original_tokens == len(whole.ids)


@pytest.mark.parametrize(("template_adds_end", "pooling"), [(False, "lasttoken"), (True, "mean")])
def test_qwen3_with_modules_equals_sentence_transformers(
    tmp_path: Path, template_adds_end, pooling
) -> None:
    """Texts end in no token that its tokenizer does not add."""
    folder = save_qwen(tmp_path / "model", template_adds_end=template_adds_end)
    save_modules(folder, {"pooling_mode": pooling}, prompts={"prompts": {"query": "search "}})
    embedder = DenseEmbedder("org/tiny", folder, 32_768, float32())
    texts = list(filter(None, varied_texts(12)))  # The reference reads no text without a token.
    np.testing.assert_allclose(embed(embedder, texts), reference_vectors(folder, texts), atol=1e-5)
    assert embedder.prompts == {"query": "search "}


def test_gte_with_a_token_classifier_also_makes_sparse_vectors(tmp_path: Path) -> None:
    """The weights are those of gte-multilingual-base's model card: the logit of each token."""
    folder = save_family(tmp_path / "model", "gte", word_tokenizer())
    dense_alone = load(folder)
    torch.manual_seed(3)
    config = GteConfig.from_pretrained(folder, num_labels=1)
    classifier = GteForTokenClassification.from_pretrained(folder, config=config).eval()
    torch.nn.init.normal_(classifier.classifier.weight)
    classifier.save_pretrained(folder)
    model = load(folder)
    assert dense_alone.kinds == Outputs(dense=True)
    assert model.kinds == Outputs(dense=True, sparse=True)
    samples = [*TEXTS, "search search \u2603"]
    texts = [text.ids for text in model.tokenize(samples)]
    results: list[Any] = model.forward(texts, model.kinds)
    assert_close([result.dense for result in results], reference(folder).encode(samples))
    unused = [model._tokenizer.token_id(token) for token in ("[CLS]", "[SEP]", "[PAD]", "[UNK]")]
    for ids, result in zip(texts, results, strict=True):
        with torch.inference_mode():
            logits = classifier(torch.from_numpy(ids)[None]).logits[0, :, 0].numpy()
        expected: dict[int, float] = {}
        for token, logit in zip(ids.tolist(), logits.tolist(), strict=True):
            if token not in unused and logit > 0:
                expected[token] = max(logit, expected.get(token, 0.0))
        assert result.sparse.indices.tolist() == sorted(expected)
        assert_close(result.sparse.values, [expected[token] for token in sorted(expected)])
    assert model.spaces["dense"] == dense_alone.spaces["dense"]
    assert str(model.spaces["sparse"]).startswith("sparse-")
