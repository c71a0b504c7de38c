"""A model's sentence-transformers configuration: it is followed, or the start says why not."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint.config import (
    Normalization,
    Projection,
    SentenceConfig,
    SentenceOverrides,
    TextOptions,
    Truncation,
    has_modules,
    read_pooling,
    read_poolings,
    read_text_config,
    read_vector_limit,
)

PACKAGE = "sentence_transformers.models."
SIZES = {"in_features": 8, "out_features": 4}
TANH = "torch.nn.modules.activation.Tanh"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path


def write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), "utf-8")


def write_modules(folder: Path, *modules: tuple[str, str, dict[str, object]]) -> None:
    """A module of each kind in its own folder, with that configuration."""
    entries = [{"type": PACKAGE + kind, "path": path} for kind, path, _ in modules]
    write(folder / "modules.json", entries)
    for _, path, config in modules:
        if path:
            write(folder / path / "config.json", config)


def test_the_steps_come_in_the_order_of_the_modules(folder) -> None:
    dense = SIZES | {"bias": False, "activation_function": "torch.nn.Identity"}
    write_modules(
        folder,
        ("Transformer", "", {}),
        ("Pooling", "1_Pooling", {"pooling_mode": ["max", "lasttoken"]}),
        ("Dropout", "2_Dropout", {}),
        ("Dense", "3_Dense", dense),
        ("Normalize", "4_Normalize", {}),
        ("Dense", "5_Dense", SIZES | {"use_residual": True}),
    )
    own = {"truncate_dim": 3, "prompts": {"query": "q: ", "": ""}, "default_prompt_name": "query"}
    write(folder / "config_sentence_transformers.json", own)
    config = SentenceConfig.read(folder)
    assert config.poolings == ("max", "last_token")
    assert config.steps == (
        Projection(folder / "3_Dense", 8, 4, False, "torch.nn.Identity", False),
        Normalization(),
        Projection(folder / "5_Dense", 8, 4, True, TANH, True),
        Truncation(3),
    )
    assert config.prompts == {"query": "q: ", "": ""}
    assert config.default_prompt == "q: "


def test_a_folder_that_says_nothing_has_no_steps(folder) -> None:
    assert SentenceConfig.read(folder) == SentenceConfig()
    assert not has_modules(folder)
    assert TextOptions.read(folder) == TextOptions()
    assert read_pooling(folder) == "cls"


def test_a_pooling_in_its_usual_folder_counts_without_a_list_of_modules(folder) -> None:
    write(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    assert SentenceConfig.read(folder).poolings == ("mean",)
    assert has_modules(folder)
    assert read_pooling(folder) == "mean"


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize("module", ["Dense", "Normalize"])
def test_what_works_on_something_else_than_the_vector_is_refused(folder, module, kind) -> None:
    names = {f"module_{kind}_name": "sentence_embedding"}
    write_modules(folder, (module, "1_Step", SIZES | names))
    assert len(SentenceConfig.read(folder).steps) == 1
    names[f"module_{kind}_name"] = "token_embeddings"
    write_modules(folder, (module, "1_Step", SIZES | names))
    with pytest.raises(StartupError, match="works on token_embeddings"):
        SentenceConfig.read(folder)


@pytest.mark.parametrize(
    ("activation", "known"),
    [
        ("torch.nn.modules.activation.GELU", True),
        ("torch.nn.modules.linear.Identity", True),
        ("torch.nn.modules.activation.Softmax", False),
        ("own.Tanh", False),
        ("Tanh", False),
    ],
)
def test_only_pytorchs_activations_are_applied(folder, activation, known) -> None:
    write_modules(folder, ("Dense", "1_Dense", SIZES | {"activation_function": activation}))
    if known:
        assert SentenceConfig.read(folder).steps[0].activation == activation
    else:
        with pytest.raises(StartupError, match="has the activation"):
            SentenceConfig.read(folder)


def test_modules_that_would_not_be_computed_are_refused(folder) -> None:
    write_modules(folder, ("LSTM", "1_LSTM", {}))
    with pytest.raises(StartupError, match="names the module LSTM"):
        SentenceConfig.read(folder)
    write_modules(folder, ("Transformer", "0_Transformer", {}))
    with pytest.raises(StartupError, match="has the transformer in 0_Transformer"):
        SentenceConfig.read(folder)


@pytest.mark.parametrize(
    ("config", "poolings"),
    [
        ({}, ("mean",)),
        ({"pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["mean", "max"]}, ("mean", "max")),
        ({"pooling_mode": "mean_sqrt_len_tokens", "include_prompt": True}, ("mean_sqrt_length",)),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        (
            {"pooling_mode_weightedmean_tokens": True, "pooling_mode_max_tokens": True},
            ("max", "weighted_mean"),
        ),
    ],
)
def test_poolings_have_an_older_and_a_newer_name(folder, config, poolings) -> None:
    write(folder / "config.json", config)
    assert read_poolings(folder) == poolings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pooling_mode": "median"}, "names no pooling that is known here"),
        ({"pooling_mode": ["mean", "median"]}, "names no pooling that is known here"),
        ({"pooling_mode": "mean", "include_prompt": False}, "leaves the prompt out"),
    ],
)
def test_a_pooling_that_is_not_computed_is_refused(folder, config, message) -> None:
    write(folder / "config.json", config)
    with pytest.raises(StartupError, match=message):
        read_poolings(folder)


@pytest.mark.parametrize("modes", ["max", ["cls", "mean"]])
def test_bge_m3s_kind_has_one_of_two_poolings(folder, modes) -> None:
    write(folder / "1_Pooling" / "config.json", {"pooling_mode": modes})
    with pytest.raises(StartupError, match="use cls or mean"):
        read_pooling(folder)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"prompts": ["query"]}, "no usable prompts"),
        ({"prompts": {"query": 1}}, "no usable prompts"),
        ({"prompts": {"a": "b"}, "default_prompt_name": "c"}, "default_prompt_name: c"),
        ({"default_prompt_name": "c"}, "default_prompt_name: c"),
        ({"truncate_dim": 0}, "no usable truncate_dim: 0"),
        ({"truncate_dim": True}, "no usable truncate_dim: True"),
        ({"truncate_dim": "3"}, "no usable truncate_dim: 3"),
    ],
)
def test_what_cannot_be_meant_stops_the_start(folder, own, message) -> None:
    write(folder / "config_sentence_transformers.json", own)
    with pytest.raises(StartupError, match=message):
        SentenceConfig.read(folder)


def test_prompts_that_are_all_empty_are_none(folder) -> None:
    write(folder / "config_sentence_transformers.json", {"prompts": {"a": "", "b": ""}})
    assert SentenceConfig.read(folder).prompts == {}
    assert read_vector_limit(folder, "truncate_dim") is None
    write(folder / "config_sentence_transformers.json", {"truncate_dim": 1})
    assert read_vector_limit(folder, "truncate_dim") == 1


@given(
    st.one_of(st.none(), st.integers(-3, 9000), st.booleans(), st.floats(1, 2), st.text()),
    st.one_of(st.none(), st.integers(-3, 9000), st.just(10**30), st.just(1_000_000_000)),
)
def test_texts_are_cut_where_the_model_or_its_tokenizer_says_so(length, limit) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "sentence_bert_config.json", {"max_seq_length": length, "a": 1})
        write(folder / "tokenizer_config.json", {"model_max_length": limit})
        found = TextOptions.read(folder).max_length
    if length:
        assert found == (length if type(length) is int and length > 0 else None)
    else:
        assert found == (limit if limit and 0 < limit < 1_000_000_000 else None)


def test_of_the_files_by_family_the_first_counts_that_says_something(folder) -> None:
    write(folder / "sentence_bert_config.json", {})
    write(folder / "sentence_xlnet_config.json", {"max_seq_length": 7, "do_lower_case": True})
    write(folder / "sentence_roberta_config.json", {"max_seq_length": 5})
    assert read_text_config(folder) == {"max_seq_length": 5}
    assert TextOptions.read(folder) == TextOptions(max_length=5, lower_case=False)
    (folder / "sentence_roberta_config.json").unlink()
    assert TextOptions.read(folder) == TextOptions(max_length=7, lower_case=True)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"tokenizer_args": {"split": 1}}, "has tokenizer_args for its texts"),
        ({"config_kwargs": {"trust_remote_code": True, "own": 1}}, "has config_kwargs"),
        ({"query_length": 32}, "has query_length"),
        ({"query_expansion": False}, "has query_expansion"),
        ({"modality_config": {"message": {}}}, "messages of a chat template"),
    ],
)
def test_options_that_would_change_what_is_read_are_refused(folder, texts, message) -> None:
    write(folder / "sentence_bert_config.json", texts)
    with pytest.raises(StartupError, match=message):
        TextOptions.read(folder)


def test_options_that_change_nothing_are_passed_over(folder) -> None:
    harmless = {"tokenizer_args": {"use_fast": True}, "config_args": None, "modality_config": {}}
    write(folder / "sentence_bert_config.json", harmless | {"query_length": None})
    assert TextOptions.read(folder) == TextOptions()
    write(folder / "sentence_bert_config.json", {"query_length": 32})
    assert TextOptions.read(folder, by_type=True) == TextOptions()


def test_only_settings_that_are_set_are_refused() -> None:
    overrides = SentenceOverrides(normalize=False, query_prompt="")
    assert overrides.prompts == {"query": ""}
    overrides.refuse("pooling", "document_prompt", for_model="m")
    with pytest.raises(StartupError, match="NORMALIZE=false has no effect on the model m"):
        overrides.refuse("pooling", "normalize", for_model="the model m")
    with pytest.raises(StartupError, match="^QUERY_PROMPT= has no effect"):
        overrides.refuse("query_prompt", for_model="m")
