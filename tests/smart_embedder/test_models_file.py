"""The file of MODELS in YAML and TOML, and its error messages."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.errors import StartupError
from smart_embedder.models_file import read_model_entries
from smart_embedder.settings import ModelEntry
from tests.support.no_settings import empty_environment  # noqa: F401 - used by each test


def read(folder: Path, text: str) -> tuple[ModelEntry, ...]:
    path = folder / "models.yaml"
    path.write_text(text, "utf-8")
    return read_model_entries(path)


def test_every_field_is_read(tmp_path: Path) -> None:
    fields = {
        "name": "acme/judge", "task": "embed", "aliases": ("judge", "j2"), "revision": "3",
        "device": "cuda:1", "dtype": "bfloat16", "max_length": 512, "pooling": "mean",
        "normalize": False, "query_prompt": "query: ", "document_prompt": "", "load": "start",
        "pinned": True, "kind": None,
    }  # fmt: skip
    text = """
# Further models.
- name: acme/judge
  task: embed
  aliases: [judge, "j2"]
  revision: "3"
  device: cuda:1
  dtype: bfloat16
  max_length: 512
  pooling: mean
  normalize: false
  query_prompt: "query: "
  document_prompt: ""
  load: start
  pinned: true
- name: acme/other
  aliases: other-one
- name: acme/reranker
  task: rerank
  kind: entailment
"""
    judge, other, reranker = read(tmp_path, text)
    assert judge.model_dump(exclude={"location"}) == fields
    assert (other.task, other.load, other.pinned) == ("embed", "first_use", False)
    assert (judge.location, other.location) == ("models.yaml, line 3", "models.yaml, line 16")
    assert other.aliases == ("other-one",)
    assert (reranker.task, reranker.kind) == ("rerank", "entailment")


OF_B = "- name: a/b\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the file must be a list of models with names"),
        ("models: 3", 1, "the file must be a list of models with names"),
        (f"\n{OF_B}  task: \x07\n", 3, "there is a character that YAML does not allow"),
        ("- a\n", 1, "a model needs a name, as in `- name: my/model`"),
        (f"{OF_B}- load: start\n", 2, "this model has no name"),
        (f"{OF_B}  dtype: float4\n", 2, "dtype=float4 is not allowed: auto, float16, bfloat16, fl"),
        (f"{OF_B}\n  load: later\n", 3, "load=later is not allowed: start or first_use"),
        (f"{OF_B}  revision: 3\n", 2, "revision=3 is not allowed: a branch, tag or commit, in quo"),
        (f"{OF_B}  aliases: [1]\n", 2, "aliases=[1] is not allowed: a name, or a list of names"),
        (f"{OF_B}  task: rerank\n  kind: [1]\n", 3, "kind=[1] is not allowed: the name of a l"),
        (f"{OF_B}  kind: zerank-2\n", 2, "kind has no effect on a model with the task embed: it"),
        (f"{OF_B}  task: rerank\n  normalize: true\n", 3, "normalize has no effect on a model wi"),
        (f"{OF_B}  ? [c]\n  : 1\n", 2, "the name of a field is a word"),
        (f"{OF_B}  alias: c\n", 2, "a model has no field alias: the nearest is aliases"),
        (f"{OF_B}  name: c/d\n", 2, "this model has name twice"),
        (f"{OF_B}- name: c/d\n  aliases: A/B\n", 2, "A/B is a name of the model of models.yaml, l"),
        ("- name: https://u:p@host\n", 1, "name=**********"),
        ("- name: [a\n", 2, "expected ',' or ']'"),
        ("- name: !!python/object:os.system a\n", 1, "this is not a valid YAML value"),
    ],
)
def test_an_error_in_yaml_names_the_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    with pytest.raises(StartupError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"models.yaml, line {line}: {message}")
    assert "\n" not in str(caught.value)


def test_deeply_nested_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="^models.yaml is nested too deeply$"):
        read(tmp_path, "[" * 1_000)


def read_toml(folder: Path, text: str) -> tuple[ModelEntry, ...]:
    path = folder / "models.toml"
    path.write_text(text, "utf-8")
    return read_model_entries(path)


def test_toml_is_read_like_yaml(tmp_path: Path) -> None:
    judge = 'name = "a/judge"\naliases = ["judge", "j2"]\nmax_length = 512\npinned = true'
    in_toml = read_toml(tmp_path, f"[[models]]\n{judge}\n[[models]]\nname = 'a/other'\n")
    in_yaml = read(
        tmp_path,
        "- {name: a/judge, aliases: [judge, j2], max_length: 512, pinned: true}\n- name: a/other\n",
    )
    for left, right in zip(in_toml, in_yaml, strict=True):
        assert left.model_dump(exclude={"location"}) == right.model_dump(exclude={"location"})
    assert in_toml[1].location == "models.toml, model 2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = 3", "models.toml: models must be a list of tables [[models]]"),
        ("models = [3]", "models.toml, model 1: a model is a table [[models]]"),
        ("[[models]]\nname = a", "models.toml: Invalid value (at line 2, column 8)"),
        (
            "[[models]]\nname = 'a/b'\n[[models]]\nname = 'c/d'\nalias = 'e'",
            "models.toml, model 2: a model has no field alias: the nearest is aliases",
        ),
        (
            "[[models]]\nname = 'a/b'\n[[models]]\nname = 'A/B'",
            "models.toml, model 2: A/B is a name of the model of models.toml, model 1, too",
        ),
    ],
)
def test_an_error_in_toml_names_the_model_or_the_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(StartupError) as caught:
        read_toml(tmp_path, text)
    assert str(caught.value) == message


@given(st.text())
def test_any_file_is_read_or_raises_a_startup_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    for read_file in (read, read_toml):
        with suppress(StartupError):
            assert read_file(tmp_path_factory.getbasetemp(), text)
