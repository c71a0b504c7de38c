"""Reading the JSON files of a model: values are followed, or refused with a reason."""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.errors import StartupError
from smart_embedder.models.files.config import (
    CLASSES,
    Module,
    SentenceOverrides,
    TextOptions,
    has_modules,
    read_config,
    read_default_prompt,
    read_integer,
    read_modules,
    read_number,
    read_optional,
    read_pooling,
    read_poolings,
    read_prompts,
    read_text_config,
    read_vector_limit,
    require_known_modules,
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
def test_whole_number_is_an_integer_in_range(value, least) -> None:
    if type(value) is int and least <= value <= 2**31:
        assert read_integer(Path("m"), {"a": value}, "a", least=least) == value
    else:
        with pytest.raises(StartupError, match="no usable a: "):
            read_integer(Path("m"), {"a": value}, "a", least=least)


@given(ANYTHING)
def test_number_is_finite_and_positive(value) -> None:
    if type(value) in {int, float} and 0 < value <= 2**31:
        found = read_number(Path("m"), {"a": value}, "a", 1.0)
        assert (type(found), found) == (float, value)
    else:
        with pytest.raises(StartupError, match="no usable a: "):
            read_number(Path("m"), {"a": value}, "a", 1.0)


def test_missing_number_has_its_default_or_is_refused() -> None:
    assert read_integer(Path("m"), {}, "a", 7) == 7
    assert read_number(Path("m"), {}, "a", 7) == 7.0
    assert read_integer(Path("m"), {"a": 1}, "a") == 1
    for config, least in (({}, 0), ({}, 2), ({"a": 0}, 1)):
        with pytest.raises(StartupError, match=f"no usable a: {config.get('a')}"):
            read_integer(Path("m"), config, "a", least=least)


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "is not a JSON object"), ("{", "cannot be read"), ("[" * 200_000, "cannot be read")],
)
def test_config_that_is_no_json_object_is_refused(tmp_path, content, message) -> None:
    assert read_optional(tmp_path / "config.json") == {}
    with pytest.raises(StartupError, match="is not a model: it holds no config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(content)
    for read in (read_config, lambda folder: read_optional(folder / "config.json")):
        with pytest.raises(StartupError, match=f"config.json {message}"):
            read(tmp_path)


CONFIG, MODULES, POOLING = "config.json", "modules.json", "1_Pooling/config.json"
OWN, TEXTS, OLDER = (f"{name}.json" for name in (
    "config_sentence_transformers", "sentence_bert_config", "sentence_xlnet_config",
))  # fmt: skip
limit = partial(read_vector_limit, name="truncate_dim")
known = lambda folder: require_known_modules(folder, "A", "C")  # noqa: E731
VARIABLES = {"b": "c", "a": True, "restore_suffix": False}
PROMPTS = {"a": "", "b": "c"}
HARMLESS = {
    "tokenizer_args": {"use_fast": True},
    "model_args": {"torch_dtype": "float16"},
    "config_args": None,
    "modality_config": {},
}


of_classes = partial(TextOptions.read, task=CLASSES)


def modality(**options: Any) -> dict[str, Any]:
    return {"modality_config": {"text": {"method": "forward"} | options}}


SAVED_CLASSES = modality(method_output_name="logits") | {
    "transformer_task": "sequence-classification"
}


def modules(*kinds: str, **others: Any) -> list[Any]:
    return [{"type": kind, **others} for kind in kinds]


@pytest.mark.parametrize(
    ("read", "file", "content", "expected"),
    [
        (known, MODULES, modules(f"{PACKAGE}A", f"{PACKAGE}C"), None),
        *((read, None, None, empty) for read, empty in (
            (read_modules, []), (has_modules, False), (read_pooling, "cls"), (limit, None),
        )),
        (read_poolings, CONFIG, {"pooling_mode": ["mean", "max"]}, ("mean", "max")),
        (read_poolings, CONFIG, {"pooling_mode": "mean_sqrt_len_tokens"}, ("mean_sqrt_length",)),
        (
            read_poolings,
            CONFIG,
            {f"pooling_mode_{pooling}_tokens": True for pooling in ("weightedmean", "max")},
            ("max", "weighted_mean"),
        ),
        (read_pooling, POOLING, {"pooling_mode": "mean"}, "mean"),
        (has_modules, POOLING, {}, True),
        (read_prompts, OWN, {"prompts": {"a": "", "b": ""}}, {}),
        (read_default_prompt, OWN, {"prompts": PROMPTS, "default_prompt_name": "b"}, "c"),
        (limit, OWN, {"truncate_dim": 1}, 1),
        (TextOptions.read, TEXTS, HARMLESS | {"query_length": None}, TextOptions()),
        (of_classes, TEXTS, SAVED_CLASSES, TextOptions()),
        (
            TextOptions.read,
            TEXTS,
            {"modality_config": {"text": {"method": "embed"}, "message": {"format": "flat"}}},
            TextOptions(message_format="flat"),
        ),
        (
            TextOptions.read,
            TEXTS,
            {"modality_config": {"message": {}}, "processing_kwargs": {"chat_template": VARIABLES}},
            TextOptions(message_format="auto", template_options=(("a", True), ("b", "c"))),
        ),
        (TextOptions.read, OLDER, {"max_seq_length": 7, "do_lower_case": 1}, TextOptions(7, True)),
    ],
)  # fmt: skip
def test_configuration_files_are_followed(read, file, content, expected, tmp_path: Path) -> None:
    if file is not None:
        write(tmp_path / file, content)
    assert read(tmp_path) == expected


def test_modules_keep_their_order_and_folders(tmp_path) -> None:
    entries = modules(f"{PACKAGE}Transformer", path="") + modules("pylate.Dense.Dense", path="1")
    write(tmp_path / MODULES, entries + modules("pylate.A"))
    found = [Module("Transformer", tmp_path), Module("Dense", tmp_path / "1")]
    assert read_modules(tmp_path) == [*found, Module("A", tmp_path)]


def test_first_nonempty_text_config_counts(tmp_path) -> None:
    write(tmp_path / TEXTS, {})
    write(tmp_path / OLDER, {"max_seq_length": 7})
    write(tmp_path / "sentence_roberta_config.json", {"max_seq_length": 5})
    assert read_text_config(tmp_path) == {"max_seq_length": 5}


NO_TYPE, NO_POOLING = "has a module without a type", "names no supported pooling"
OWN_CODE, OUTSIDE = "code of a checkpoint is never run", "names a folder outside the model"


@pytest.mark.parametrize(
    ("read", "file", "content", "message"),
    [
        (read_modules, MODULES, {}, "is not a list of modules"),
        *((read_modules, MODULES, [entry], NO_TYPE) for entry in ("A", {"path": "1"}, {"type": 1})),
        (read_modules, MODULES, modules("own.Pooling"), f"names own.Pooling: {OWN_CODE}"),
        (read_modules, MODULES, modules("sentence_transformers_.A"), OWN_CODE),
        *(
            (read_modules, MODULES, modules("pylate.A", path=path), f"{OUTSIDE}: '{shown}'")
            for path, shown in (("../other", "../other"), ("/etc", "/etc"), ("a\0b", "a.x00b"))
        ),
        *((read_config, CONFIG, {name: value}, f"no usable {name}: ") for name, value in (
            ("architectures", "BertModel"), ("architectures", [1]), ("model_type", 0),
        )),
        (known, MODULES, modules(f"{PACKAGE}A", f"{PACKAGE}B"), "module B; supported: A, C$"),
        (read_poolings, CONFIG, {"pooling_mode": "median"}, NO_POOLING),
        (read_poolings, CONFIG, {"pooling_mode": ["mean", "median"]}, NO_POOLING),
        (read_poolings, CONFIG, {"include_prompt": False}, "leaves the prompt out"),
        (read_pooling, POOLING, {"pooling_mode": ["cls", "mean"]}, "use cls or mean"),
        (read_prompts, OWN, {"prompts": {"query": 1}}, "no usable prompts"),
        (read_default_prompt, OWN, {"default_prompt_name": "c"}, "with its default_prompt_name: c"),
        (
            read_default_prompt,
            OWN,
            {"prompts": PROMPTS, "default_prompt_name": ["a"]},
            "default_prompt_name: ",
        ),
        (limit, OWN, {"truncate_dim": 0}, "_dim: 0"),
        (TextOptions.read, TEXTS, {"transformer_task": "fill-mask"}, "makes fill-mask of texts"),
        (TextOptions.read, TEXTS, modality(method="embed"), "makes embed of texts .*: forward is"),
        *((TextOptions.read, TEXTS, modality(method_output_name=output), "last_hidden_state is")
          for output in ("pooler_output", ["hidden_states", 0])),
        (of_classes, TEXTS, {"transformer_task": "feature-extraction"}, ": sequence-classific"),
        (of_classes, TEXTS, modality(method_output_name="last_hidden_state"), ": logits is"),
        *((TextOptions.read, TEXTS, {name: value}, f"has {name} for its texts") for name, value in (
            ("model_args", {"num_hidden_layers": 1}), ("model_kwargs", {"dtype": "auto", "a": 1}),
            ("tokenizer_args", {"split": 1}), ("processor_kwargs", {"do_lower_case": False}),
            ("config_kwargs", 5), ("processing_kwargs", {"text": {"max_length": 9}}),
            ("query_length", 32), ("query_expansion", False),
        )),
        (TextOptions.read, TEXTS, {"modality_config": {"message": {"method": "a"}}}, "makes a of"),
        *(
            (
                TextOptions.read,
                TEXTS,
                {"modality_config": {"message": {}}, "processing_kwargs": options},
                "has processing_kwargs for its texts",
            )
            for options in (
                {"text": {"max_length": 9}},
                {"chat_template": {"truncation": False}},
                {"chat_template": {"a": ["b"]}},
                {"chat_template": 5},
            )
        ),
    ],
)  # fmt: skip
def test_invalid_and_unsupported_configurations_stop_the_start(
    read, file, content, message, tmp_path: Path
) -> None:
    write(tmp_path / file, content)
    with pytest.raises(StartupError, match=message):
        read(tmp_path)


@given(
    st.one_of(st.none(), st.integers(-3, 9000), st.booleans(), st.floats(1, 2), st.text()),
    st.one_of(st.none(), st.integers(-3, 9000), st.just(10**30), st.just(1_000_000_000)),
)
def test_max_seq_length_or_the_tokenizers_limit_is_read(length, limit) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / TEXTS, {"max_seq_length": length, "a": 1})
        write(folder / "tokenizer_config.json", {"model_max_length": limit})
        found = TextOptions.read(folder).max_length
    if length:
        assert found == (length if type(length) is int and length > 0 else None)
    else:
        assert found == (limit if limit and 0 < limit < 1_000_000_000 else None)


def test_only_overrides_that_are_set_are_refused() -> None:
    overrides = SentenceOverrides(normalize=False, query_prompt="")
    assert overrides.prompts == {"query": ""}
    overrides.refuse("pooling", "document_prompt", for_model="m")
    with pytest.raises(StartupError, match="NORMALIZE=false has no effect on the model m"):
        overrides.refuse("pooling", "normalize", for_model="the model m")
    with pytest.raises(StartupError, match="^QUERY_PROMPT= has no effect"):
        overrides.refuse("query_prompt", for_model="m")
