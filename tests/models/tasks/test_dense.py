"""Dense encoders of many families against sentence-transformers on the same files, in float32."""

import asyncio
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from transformers import ReformerConfig, ReformerModel, T5EncoderModel

from app.engine import EmbeddingOptions, Engine
from app.engine.loaded_models import MemoryUsage
from app.engine.types import Outputs
from app.errors import InferenceError, OutOfMemoryError, StartupError
from app.models.backbones import module_transformer
from app.models.checkpoint.sentence_config import SentenceOverrides
from app.models.load import load_models
from app.models.target import Target
from app.models.tasks.choose import load_embedder
from app.models.tasks.dense import DenseEmbedder
from app.settings import Settings
from tests.support.checkpoints import corpus
from tests.support.encoders import (
    FAMILIES,
    WIDTH,
    dense,
    reference,
    reference_vectors,
    save_family,
    save_modules,
    save_tokenizer,
    word_tokenizer,
)
from tools.demo.checkpoint import package_folder

DENSE = Outputs(dense=True)
# One is empty, one has no letters, one is longer than every attention's window, one is cut.
TEXTS = ["hybrid search", "", "vector", " ".join(corpus(4)), "...", " ".join(corpus(40)), "Query"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return word_tokenizer()


@pytest.fixture(scope="module")
def bert(tokenizer: Tokenizer, tmp_path_factory) -> Path:
    """One that is not changed; the configuration of a copy may be."""
    return save_family(tmp_path_factory.mktemp("dense") / "bert", "bert", tokenizer)


@pytest.fixture
def copy(bert: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bert, tmp_path / "copy")


def load(folder: Path, target: Target, max_length: int = 8192, **options) -> DenseEmbedder:
    model = load_embedder(folder.name, folder, max_length, target, **options)
    assert isinstance(model, DenseEmbedder)
    return model


def embed(model: DenseEmbedder, texts: list[str], prompt: str = "") -> np.ndarray:
    results = model.forward([each.ids for each in model.tokenize(texts, prompt)], DENSE)
    return np.stack([each.dense for each in results])


def assert_close(ours, theirs) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_vectors_are_sentence_transformers(
    family, tokenizer, tmp_path, float32_target
) -> None:
    folder = save_family(tmp_path / family, family, tokenizer)
    with capture_logs() as logs:
        model = load(folder, float32_target)
    layout = FAMILIES[family][1]
    assert {log["used_instead"] for log in logs} == ({layout} - {"own", "packed", "padded"})
    assert model.info.paths.get("batch", "own") == layout
    alone = np.concatenate([embed(model, [text]) for text in TEXTS])
    assert_close(alone, reference_vectors(folder, TEXTS))
    assert_close(embed(model, TEXTS), alone)
    assert model.max_length == 200


def test_published_weights_make_sentence_transformers_vectors(float32_target) -> None:
    """all-MiniLM-L6-v2, from its package."""
    folder = package_folder()
    model = load(folder, float32_target)
    assert (model.max_length, model.normalizes, model.pooling) == (256, True, "mean")
    texts = [*TEXTS, "What is hybrid search? " * 70]
    assert_close(embed(model, texts), reference(folder).encode(texts))


async def test_an_engine_serves_one_and_neighbours_change_nothing(
    tokenizer, tmp_path, monkeypatch
) -> None:
    prompts = {"prompts": {"query": "Query ", "doc": "Document "}, "default_prompt_name": "doc"}
    folder = save_family(tmp_path / "modern", "modernbert", tokenizer)
    save_modules(folder, further=[dense(16, "Tanh"), ("Normalize", {}, None)], prompts=prompts)
    theirs = reference(folder)
    settings = Settings(
        embedding_model=str(folder), reranker_model="none", device="cpu", dtype="float32"
    )
    async with Engine(settings, load_models) as engine:
        alone = [(await engine.embed([text])).embeddings[0].dense for text in TEXTS]
        among = [each.dense for each in (await engine.embed(TEXTS)).embeddings]
        asked = await engine.embed(TEXTS[:1], options=EmbeddingOptions(prompt_name="query"))
    assert_close(among, theirs.encode(TEXTS))
    assert_close(alone, among)
    assert_close(asked.embeddings[0].dense, theirs.encode(TEXTS[:1], prompt_name="query")[0])


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_cls_token": True},
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_sqrt_len_tokens": True},
        {"pooling_mode_weightedmean_tokens": True},
        {"pooling_mode_lasttoken": True},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode": "weightedmean", "embedding_dimension": WIDTH},
        {"pooling_mode": ["max", "lasttoken"], "embedding_dimension": WIDTH},
        {"pooling_mode_mean_tokens": False},
    ],
    ids=str,
)
def test_every_pooling_is_sentence_transformers(pooling, copy, float32_target) -> None:
    if "pooling_mode" not in pooling:
        pooling = {"pooling_mode_mean_tokens": False} | pooling
    save_modules(copy, pooling)
    model = load(copy, float32_target)
    assert_close(embed(model, TEXTS), reference(copy).encode(TEXTS))
    assert model.dense_width == len(embed(model, ["music"])[0])


def residual(out_features: int) -> tuple:
    kind, config, layer = dense(out_features, "Tanh")
    return kind, config | {"use_residual": True}, layer


@pytest.mark.parametrize(
    "further",
    [
        [dense(32, "Tanh")],
        [dense(80, "GELU", bias=False), ("Normalize", {}, None)],
        [dense(WIDTH, "ReLU"), dense(24, "Sigmoid"), ("Normalize", {}, None)],
        [("Normalize", {}, None), dense(16, "SiLU")],
        [("Dropout", {"dropout": 0.1}, None), residual(WIDTH)],
    ],
    ids=["one", "normalised", "two", "normalised before", "residual"],
)
def test_every_projection_is_sentence_transformers(further, copy, float32_target) -> None:
    save_modules(copy, further=further)
    model = load(copy, float32_target)
    assert_close(embed(model, TEXTS), reference(copy).encode(TEXTS))
    assert model.normalizes == (further[-1][0] == "Normalize")


def test_what_a_newer_sentence_transformers_saves_is_read(copy, float32_target, tmp_path) -> None:
    save_modules(copy, further=[dense(32, "Tanh"), ("Normalize", {}, None)])
    saved = tmp_path / "saved"
    reference(copy).save(str(saved))
    assert_close(embed(load(saved, float32_target), TEXTS), reference_vectors(copy, TEXTS))


def test_limits_and_small_letters_are_sentence_transformers(copy, float32_target) -> None:
    save_modules(copy, texts={"max_seq_length": 20, "do_lower_case": True})
    texts = ["HYBRID Search", "Query", " ".join(corpus(9))]
    model = load(copy, float32_target)
    assert model.max_length == 20
    assert_close(embed(model, texts), reference(copy).encode(texts))
    assert load(copy, float32_target, 12).max_length == 12


def test_a_setting_takes_the_place_of_the_pooling(copy, float32_target) -> None:
    overrides = SentenceOverrides(pooling="cls")
    named = embed(load(copy, float32_target, overrides=overrides), TEXTS)
    save_modules(copy, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    assert_close(named, reference(copy).encode(TEXTS))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("further", [[], [("Normalize", {}, None)]], ids=["raw", "scaled"])
def test_a_setting_takes_the_place_of_the_scaling(normalize, further, copy, float32_target) -> None:
    save_modules(copy, further=further)
    model = load(copy, float32_target, overrides=SentenceOverrides(normalize=normalize))
    save_modules(copy, further=[("Normalize", {}, None)] if normalize else [])
    assert_close(embed(model, TEXTS), reference(copy).encode(TEXTS))
    assert model.normalizes == normalize


def test_settings_take_the_place_of_prompts(copy, float32_target) -> None:
    configured = {"query": "ask: ", "passage": "text: ", "other": "o: "}
    (copy / "config_sentence_transformers.json").write_text(json.dumps({"prompts": configured}))
    overrides = SentenceOverrides(query_prompt="query: ", document_prompt="")
    model = load(copy, float32_target, overrides=overrides)
    assert dict(model.prompts) == configured | {"query": "query: ", "document": ""}


async def test_the_prompts_of_settings_are_read_by_input_type(copy) -> None:
    prompts = {"query_prompt": "query: ", "document_prompt": "passage: "}
    settings = Settings(
        embedding_model=str(copy), reranker_model="none", device="cpu", dtype="float32", **prompts
    )
    model = reference(copy)
    async with Engine(settings, load_models) as engine:
        for kind, prompt in (("query", "query: "), ("document", "passage: ")):
            options = EmbeddingOptions(input_type=kind)
            result = await engine.embed(TEXTS, options=options)
            found = np.stack([each.dense for each in result.embeddings])
            assert_close(found, model.encode(TEXTS, prompt=prompt))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (SentenceOverrides(pooling="cls"), "POOLING=cls has no effect on m3, which is of bge-m3's"),
        (SentenceOverrides(normalize=True), "NORMALIZE=true has no effect on m3, which is of"),
    ],
)
def test_a_setting_without_effect_stops_the_start(
    overrides, sentence: str, tiny_m3: Path, float32_target
) -> None:
    with pytest.raises(StartupError, match=sentence):
        load_embedder("m3", tiny_m3, 512, float32_target, overrides)


def test_a_model_of_bge_m3s_kind_reads_the_prompts_of_settings(tiny_m3, float32_target) -> None:
    overrides = SentenceOverrides(query_prompt="query: ")
    model = load_embedder("m3", tiny_m3, 512, float32_target, overrides)
    assert dict(model.prompts) == {"query": "query: "}


def test_without_a_configuration_the_mean_is_taken(copy, float32_target) -> None:
    before = embed(load(copy, float32_target), TEXTS)
    (copy / "modules.json").unlink()
    shutil.rmtree(copy / "1_Pooling")
    assert_close(embed(load(copy, float32_target), TEXTS), before)


@pytest.mark.parametrize("family", ["bert", "modernbert", "t5"])
def test_a_number_that_is_not_finite_is_one_texts_alone(
    family, tokenizer, tmp_path, float32_target
) -> None:
    folder = save_family(tmp_path / family, family, tokenizer)
    weights = load_file(folder / "model.safetensors")
    name = next(each for each in weights if weights[each].shape[0] == 700)
    beginning = tokenizer.encode("music").ids[1]
    assert beginning >= 100  # The proof at the start draws from those before.
    weights[name][beginning] = torch.nan
    other = shutil.copytree(folder, tmp_path / "poisoned")
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    expected = embed(load(folder, float32_target), ["hybrid search", "bread"])
    poisoned = load(other, float32_target)
    texts = ["hybrid search", "a long music " * 9, "bread"]
    ids = [each.ids for each in poisoned.tokenize(texts)]
    first, second, third = poisoned.forward(ids, Outputs(dense=True, states=True))
    assert isinstance(second, InferenceError)
    assert_close([first.dense, third.dense], expected)
    assert first.states.shape == (len(ids[0]), WIDTH)


def test_a_packed_path_that_computes_something_else_gives_way_to_padding(
    tokenizer, tmp_path, float32_target, monkeypatch
) -> None:
    def wrong(*arguments, **options):
        attended, rest = attend(*arguments, **options)
        return attended * 1.01, rest

    attend = module_transformer.attend_packed
    monkeypatch.setattr(module_transformer, "attend_packed", wrong)
    folder = save_family(tmp_path / "gte", "gte", tokenizer)
    with capture_logs() as logs:
        model = load(folder, float32_target)
    (warning,) = logs
    assert (warning["event"], warning["path"]) == ("path_refused", "packed")
    assert warning["used_instead"] == model.info.paths["batch"] == "padded"
    assert [each.path for each in model.info.refused] == ["packed"]
    assert_close(embed(model, TEXTS), reference(folder).encode(TEXTS))


@pytest.mark.parametrize("broken", [False, True])
def test_a_window_wider_than_the_texts_of_the_trial_is_tried(
    broken, tokenizer, tmp_path, float32_target, monkeypatch
) -> None:
    if broken:
        attend = module_transformer.attend_packed

        def without_window(*states, **options):
            return attend(*states, **options | {"sliding_window": None})

        monkeypatch.setattr(module_transformer, "attend_packed", without_window)
    folder = save_family(tmp_path / "mistral", "mistral", tokenizer)
    change(folder, "sentence_bert_config.json", max_seq_length=3000)
    with capture_logs() as logs:
        model = load(folder, float32_target)
    assert [log["path"] for log in logs] == (["packed"] if broken else [])
    text = " ".join(corpus(80))
    assert 1200 < len(model.tokenize([text])[0].ids) < 3000
    assert_close(embed(model, [text, "music"]), reference_vectors(folder, [text, "music"]))


@pytest.fixture(scope="module")
def t5(tokenizer: Tokenizer, tmp_path_factory) -> Path:
    folder = save_family(tmp_path_factory.mktemp("long") / "t5", "t5", tokenizer)
    change(folder, "sentence_bert_config.json", max_seq_length=8192)
    return folder


def test_a_forward_holds_as_many_long_texts_as_their_attention_leaves_memory_for(
    t5: Path, float32_target, monkeypatch
) -> None:
    rows = []
    forward = T5EncoderModel.forward

    def counted(self, input_ids, attention_mask):
        rows.append(tuple(input_ids.shape))
        return forward(self, input_ids, attention_mask)

    model = load(t5, float32_target)
    monkeypatch.setattr(T5EncoderModel, "forward", counted)
    # Three times the scores of four heads in float32, and the mask's byte: 49 for each pair.
    monkeypatch.setattr(module_transformer, "_GROUP_BYTES", 49 * 2 * 120**2)
    ids = [np.full(length, 9) for length in (100, 110, 120, 120, 40, 40, 40)]
    together = model.forward(ids, DENSE)
    assert rows == [(3, 40), (2, 110), (2, 120)]
    for each, own in zip(together, ids, strict=True):
        assert_close(each.dense, model.forward([own], DENSE)[0].dense)


async def test_a_text_whose_attention_does_not_fit_the_memory_is_refused_and_no_other(
    t5: Path, monkeypatch
) -> None:
    settings = Settings(
        embedding_model=str(t5), reranker_model="none", device="cpu", dtype="float32"
    )
    long = " ".join(corpus(1200))
    async with Engine(settings, load_models) as engine:
        alone = (await engine.embed(["music"])).embeddings[0].dense
        free = MemoryUsage(used=0, total=2**30)
        monkeypatch.setattr(module_transformer, "memory_usage", lambda _: free)
        short, refused = await asyncio.gather(
            engine.embed(["music"]), engine.embed([long]), return_exceptions=True
        )
    assert_close(short.embeddings[0].dense, alone)
    assert isinstance(refused, OutOfMemoryError)
    assert re.fullmatch(
        r"attention over a text of \d+ tokens takes \d\.\d GiB in this model, and 0\.5 GiB can be "
        "had; send shorter texts, or lower max_tokens or EMBED_MAX_LENGTH",
        str(refused),
    )


def test_a_model_that_makes_other_vectors_each_time_is_refused(
    tokenizer, tmp_path, float32_target
) -> None:
    """Reformer draws its hashes anew unless a seed is given."""
    config = ReformerConfig(
        vocab_size=700, hidden_size=WIDTH, attention_head_size=16, num_attention_heads=4,
        attn_layers=["lsh"], axial_pos_embds=False, feed_forward_size=96, num_buckets=8,
        lsh_attn_chunk_length=8, max_position_embeddings=128, is_decoder=False,
    )  # fmt: skip
    ReformerModel(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, tokenizer)
    with pytest.raises(StartupError, match="of type reformer, makes other vectors of the same"):
        load(save_modules(tmp_path), float32_target)


def change(folder: Path, name: str, **changes) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("known", [False, True])
def test_code_of_a_checkpoint_is_never_run(known, tokenizer, tmp_path, float32_target) -> None:
    folder = save_family(tmp_path / "code", "gte", tokenizer)
    ran = tmp_path / "ran"
    for name in ("configuration_evil.py", "modeling_evil.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "configuration_evil.Evil", "AutoModel": "modeling_evil.Evil"}
    change(folder, "config.json", auto_map=auto_map, **({} if known else {"model_type": "evil"}))
    if known:
        plain = save_family(tmp_path / "plain", "gte", tokenizer)
        assert_close(embed(load(folder, float32_target), TEXTS), reference_vectors(plain, TEXTS))
    else:
        with pytest.raises(StartupError, match="needs code of its own .* is never run"):
            load(folder, float32_target)
    assert not ran.exists()


def module_of_ones_own(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "custom_code.Pooling"
    (folder / "modules.json").write_text(json.dumps(modules))


def without_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop(next(name for name in weights if "q_proj" in name or "query" in name))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def language_model(folder: Path) -> None:
    (folder / "modules.json").unlink()
    shutil.rmtree(folder / "1_Pooling")
    change(folder, "config.json", architectures=["BertLMHeadModel"])


def classifier(folder: Path) -> None:
    language_model(folder)
    change(folder, "config.json", architectures=["BertForSequenceClassification"])


STOPS = {
    "an unknown type": (
        lambda folder: change(folder, "config.json", model_type="brain"),
        "holds a model of type brain, which transformers .* does not know",
    ),
    "an image model": (
        lambda folder: change(folder, "config.json", model_type="vit", image_size=30),
        "of type vit, which reads images or sound",
    ),
    "a module of its own": (module_of_ones_own, "custom_code.Pooling: code of a checkpoint is"),
    "an unknown module": (
        lambda folder: save_modules(folder, further=[("WeightedLayerPooling", {}, None)]),
        "names the module WeightedLayerPooling; known here: Transformer, Pooling, Dense",
    ),
    "an unknown pooling": (
        lambda folder: save_modules(folder, {"pooling_mode": "best"}),
        "names no pooling that is known here",
    ),
    "a pooling without the prompt": (
        lambda folder: save_modules(folder, {"pooling_mode": "mean", "include_prompt": False}),
        "leaves the prompt out of the pooling",
    ),
    "a projection that does not fit": (
        lambda folder: save_modules(folder, further=[dense(8, "Tanh"), dense(8, "Tanh")]),
        "takes 64 numbers, and there are 8",
    ),
    "an unknown activation": (
        lambda folder: save_modules(folder, further=[dense(8, "Softmax")]),
        "has the activation Softmax; known:",
    ),
    "a projection without weights": (
        lambda folder: save_modules(folder, further=[(*dense(8, "Tanh")[:2], None)]),
        "the weights in .*2_Dense cannot be loaded",
    ),
    "a prompt that is not there": (
        lambda folder: save_modules(folder, prompts={"prompts": {}, "default_prompt_name": "q"}),
        "has no prompt of its default_prompt_name: q",
    ),
    "a language model": (language_model, "holds a language model, .* set POOLING"),
    "a classifier": (classifier, "holds a classifier: name it in RERANKER_MODEL"),
}


@pytest.mark.parametrize(("spoil", "message"), STOPS.values(), ids=STOPS)
def test_what_cannot_run_says_why(spoil, message, copy, float32_target) -> None:
    spoil(copy)
    with pytest.raises(StartupError, match=message) as caught:
        load(copy, float32_target)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_of_any_family_stops_the_start(
    tokenizer, tmp_path, float32_target
) -> None:
    folder = save_family(tmp_path / "gemma", "embedding-gemma", tokenizer)
    without_a_tensor(folder)
    with pytest.raises(StartupError, match=r"lacks the tensor layers\.0\.self_attn\.q_proj"):
        load(folder, float32_target)


def test_a_named_attention_stops_a_family_that_cannot_have_it(
    tokenizer, tmp_path, float32_target
) -> None:
    folder = save_family(tmp_path / "t5", "t5", tokenizer)
    named = Target(
        float32_target.device, torch.float32, float32_target.backend, attention_named=True
    )
    with pytest.raises(StartupError, match="brings an attention of its own"):
        load(folder, named)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(copy, float32_target) -> None:
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([f"new{number}" for number in range(40)])
    save_tokenizer(copy, tokenizer)
    with pytest.raises(StartupError, match="they are not of one model"):
        load(copy, float32_target)


def test_a_padded_model_whose_masks_are_mapped_over_the_batch_is_loaded(
    tmp_path: Path, float32_target: Target, tokenizer
) -> None:
    folder = save_family(tmp_path / "gemma", "embedding-gemma", tokenizer)
    change(folder, "config.json", is_causal=False)
    model = load(folder, float32_target)
    assert model.info.paths["batch"] == "padded"
    assert_close(embed(model, TEXTS), reference_vectors(folder, TEXTS))


def test_positions_that_nothing_computes_are_refused(copy: Path, float32_target: Target) -> None:
    change(copy, "config.json", position_embedding_type="relative_key_query")
    with pytest.raises(StartupError, match="has positions of type relative_key_query"):
        load(copy, float32_target)
    change(copy, "config.json", model_type="electra")
    with pytest.raises(StartupError, match="has positions of type relative_key_query"):
        load(copy, float32_target)


@pytest.mark.parametrize("width", [16, WIDTH, 1000])
def test_vectors_are_cut_to_the_width_of_the_configuration(
    copy: Path, float32_target: Target, width: int
) -> None:
    (copy / "2_Normalize").mkdir()
    save_modules(copy, further=[("Normalize", {}, None)], prompts={"truncate_dim": width})
    model = load(copy, float32_target)
    made, theirs = embed(model, TEXTS), reference_vectors(copy, TEXTS)
    assert model.dense_width == made.shape[1] == min(width, WIDTH)
    assert_close(made, theirs)


@pytest.mark.parametrize("width", [0, "64"])
def test_a_width_that_is_none_is_named(copy: Path, float32_target: Target, width) -> None:
    save_modules(copy, prompts={"truncate_dim": width})
    with pytest.raises(StartupError, match="has no usable truncate_dim"):
        load(copy, float32_target)


def test_scaling_of_something_else_than_a_texts_vector_is_refused(
    copy: Path, float32_target: Target
) -> None:
    (copy / "2_Normalize").mkdir()
    of_tokens = {"module_input_name": "token_embeddings"}
    save_modules(copy, further=[("Normalize", of_tokens, None)])
    with pytest.raises(StartupError, match="works on token_embeddings"):
        load(copy, float32_target)


def test_code_that_a_known_type_names_is_logged_and_not_run(
    copy: Path, float32_target: Target
) -> None:
    (copy / "code.py").write_text("raise SystemExit")
    change(copy, "config.json", auto_map={"AutoModel": "code.Model"})
    with capture_logs() as logs:
        load_embedder("org/bert", copy, 100, float32_target)
    (warning,) = logs
    assert (warning["event"], warning["model"]) == ("checkpoint_code_ignored", "org/bert")
    assert warning["log_level"] == "warning"
