"""What a model's files of JSON say is followed, or the start says why not."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint.config import (
    Module,
    SentenceOverrides,
    TextOptions,
    has_modules,
    number,
    read_config,
    read_modules,
    read_optional,
    read_pooling,
    read_poolings,
    read_prompts,
    read_text_config,
    read_vector_limit,
    require_known_modules,
    whole_number,
)

PACKAGE = "sentence_transformers.models."
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 3), st.floats(), st.text(),
    st.sampled_from([2**31 - 1, 2**31, 2**31 + 1, 2.0**31, 2.0**31 + 1, 0.0]),
)  # fmt: skip


def write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), "utf-8")


@given(ANYTHING, st.integers(0, 2))
def test_a_whole_number_is_one_within_its_range(tmp_path_factory, value, least) -> None:
    if type(value) is int and least <= value <= 2**31:
        assert whole_number("m", {"a": value}, "a", least=least) == value
    else:
        with pytest.raises(StartupError, match="no usable a: "):
            whole_number(tmp_path_factory.getbasetemp(), {"a": value}, "a", least=least)


@given(ANYTHING)
def test_a_number_is_finite_and_above_zero(tmp_path_factory, value) -> None:
    if type(value) in {int, float} and 0 < value <= 2**31:
        found = number("m", {"a": value}, "a", 1.0)
        assert (type(found), found) == (float, value)
    else:
        with pytest.raises(StartupError, match="no usable a: "):
            number(tmp_path_factory.getbasetemp(), {"a": value}, "a", 1.0)


def test_a_number_that_is_missing_has_its_default_or_is_refused(tmp_path) -> None:
    assert whole_number(tmp_path, {}, "a", 7) == 7
    assert number(tmp_path, {}, "a", 7) == 7.0
    assert whole_number(tmp_path, {"a": 1}, "a") == 1
    for least in (0, 2):
        with pytest.raises(StartupError, match="no usable a: None"):
            whole_number(tmp_path, {}, "a", least=least)
    with pytest.raises(StartupError, match="no usable a: 0"):
        whole_number(tmp_path, {"a": 0}, "a")


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "is not a JSON object"), ("{", "cannot be read"), ("[" * 200_000, "cannot be read")],
)
def test_a_file_that_holds_no_object_is_named(tmp_path, content, message) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=f"config.json {message}"):
        read_config(tmp_path)
    with pytest.raises(StartupError, match=message):
        read_optional(tmp_path / "config.json")


def test_only_an_optional_file_may_be_missing(tmp_path) -> None:
    assert read_optional(tmp_path / "config.json") == {}
    with pytest.raises(StartupError, match="is not a model: it holds no config.json"):
        read_config(tmp_path)


def test_modules_come_in_their_order_each_with_its_folder(tmp_path) -> None:
    entries = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "pylate.models.Dense.Dense"},
    ]
    write(tmp_path / "modules.json", entries)
    assert read_modules(tmp_path) == [
        Module("Transformer", tmp_path),
        Module("Pooling", tmp_path / "1_Pooling"),
        Module("Dense", tmp_path),
    ]


def test_without_a_list_of_modules_there_are_none_and_none_is_unknown(tmp_path) -> None:
    assert read_modules(tmp_path) == []
    require_known_modules(tmp_path, "Pooling")


def test_a_module_of_another_kind_is_named_with_those_that_are_known(tmp_path) -> None:
    write(tmp_path / "modules.json", [{"type": PACKAGE + each} for each in ("A", "B", "C")])
    require_known_modules(tmp_path, "C", "B", "A")
    with pytest.raises(StartupError, match="names the module B; known here: A, C$"):
        require_known_modules(tmp_path, "A", "C")


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({}, "is not a list of modules"),
        (["Pooling"], "has a module without a type"),
        ([{"path": "1_Pooling"}], "has a module without a type"),
        ([{"type": 1}], "has a module without a type"),
        ([{"type": "own.Pooling"}], "names own.Pooling: code of a checkpoint is never run"),
        ([{"type": "sentence_transformers_.A"}], "code of a checkpoint is never run"),
        ([{"type": "pylate.A", "path": "../other"}], "a folder outside the model: '../other'"),
        ([{"type": "pylate.A", "path": "/etc"}], "a folder outside the model: '/etc'"),
        ([{"type": "pylate.A", "path": "a\0b"}], "a folder outside the model"),
    ],
)
def test_modules_that_cannot_be_meant_are_refused(tmp_path, modules, message) -> None:
    write(tmp_path / "modules.json", modules)
    with pytest.raises(StartupError, match=message):
        read_modules(tmp_path)


def test_a_folder_that_says_nothing_has_no_modules(tmp_path) -> None:
    assert not has_modules(tmp_path)
    assert TextOptions.read(tmp_path) == TextOptions()
    assert read_pooling(tmp_path) == "cls"


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
def test_poolings_have_an_older_and_a_newer_name(tmp_path, config, poolings) -> None:
    write(tmp_path / "config.json", config)
    assert read_poolings(tmp_path) == poolings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pooling_mode": "median"}, "names no pooling that is known here"),
        ({"pooling_mode": ["mean", "median"]}, "names no pooling that is known here"),
        ({"pooling_mode": "mean", "include_prompt": False}, "leaves the prompt out"),
    ],
)
def test_a_pooling_that_is_not_computed_is_refused(tmp_path, config, message) -> None:
    write(tmp_path / "config.json", config)
    with pytest.raises(StartupError, match=message):
        read_poolings(tmp_path)


@pytest.mark.parametrize("modes", ["max", ["cls", "mean"]])
def test_bge_m3s_kind_has_one_of_two_poolings(tmp_path, modes) -> None:
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": modes})
    with pytest.raises(StartupError, match="use cls or mean"):
        read_pooling(tmp_path)


def test_prompts_that_are_all_empty_are_none(tmp_path) -> None:
    write(tmp_path / "config_sentence_transformers.json", {"prompts": {"a": "", "b": ""}})
    assert read_prompts(tmp_path) == {}
    assert read_vector_limit(tmp_path, "truncate_dim") is None
    write(tmp_path / "config_sentence_transformers.json", {"truncate_dim": 1})
    assert read_vector_limit(tmp_path, "truncate_dim") == 1


@given(
    st.one_of(st.none(), st.integers(-3, 9000), st.booleans(), st.floats(1, 2), st.text()),
    st.one_of(st.none(), st.integers(-3, 9000), st.just(10**30), st.just(1_000_000_000)),
)
def test_texts_are_cut_where_the_model_or_its_tokenizer_says_so(length, limit) -> None:
    with tempfile.TemporaryDirectory() as name:
        tmp_path = Path(name)
        write(tmp_path / "sentence_bert_config.json", {"max_seq_length": length, "a": 1})
        write(tmp_path / "tokenizer_config.json", {"model_max_length": limit})
        found = TextOptions.read(tmp_path).max_length
    if length:
        assert found == (length if type(length) is int and length > 0 else None)
    else:
        assert found == (limit if limit and 0 < limit < 1_000_000_000 else None)


def test_of_the_files_by_family_the_first_counts_that_says_something(tmp_path) -> None:
    write(tmp_path / "sentence_bert_config.json", {})
    write(tmp_path / "sentence_xlnet_config.json", {"max_seq_length": 7, "do_lower_case": True})
    write(tmp_path / "sentence_roberta_config.json", {"max_seq_length": 5})
    assert read_text_config(tmp_path) == {"max_seq_length": 5}
    assert TextOptions.read(tmp_path) == TextOptions(max_length=5, lower_case=False)
    (tmp_path / "sentence_roberta_config.json").unlink()
    assert TextOptions.read(tmp_path) == TextOptions(max_length=7, lower_case=True)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"tokenizer_args": {"split": 1}}, "has tokenizer_args for its texts"),
        ({"config_kwargs": {"trust_remote_code": True, "own": 1}}, "has config_kwargs"),
        ({"config_kwargs": 5}, "has config_kwargs"),
        ({"processor_kwargs": {"do_lower_case": False}}, "has processor_kwargs"),
        ({"processing_kwargs": {"text": {"max_length": 9}}}, "has processing_kwargs"),
        ({"query_length": 32}, "has query_length"),
        ({"query_expansion": False}, "has query_expansion"),
        ({"modality_config": {"message": {}}}, "messages of a chat template"),
    ],
)
def test_options_that_would_change_what_is_read_are_refused(tmp_path, texts, message) -> None:
    write(tmp_path / "sentence_bert_config.json", texts)
    with pytest.raises(StartupError, match=message):
        TextOptions.read(tmp_path)


def test_options_that_change_nothing_are_passed_over(tmp_path) -> None:
    harmless = {"tokenizer_args": {"use_fast": True}, "config_args": None, "modality_config": {}}
    write(tmp_path / "sentence_bert_config.json", harmless | {"query_length": None})
    assert TextOptions.read(tmp_path) == TextOptions()
    write(tmp_path / "sentence_bert_config.json", {"query_length": 32})
    assert TextOptions.read(tmp_path, by_type=True) == TextOptions()


def test_only_settings_that_are_set_are_refused() -> None:
    overrides = SentenceOverrides(normalize=False, query_prompt="")
    assert overrides.prompts == {"query": ""}
    overrides.refuse("pooling", "document_prompt", for_model="m")
    with pytest.raises(StartupError, match="NORMALIZE=false has no effect on the model m"):
        overrides.refuse("pooling", "normalize", for_model="the model m")
    with pytest.raises(StartupError, match="^QUERY_PROMPT= has no effect"):
        overrides.refuse("query_prompt", for_model="m")
