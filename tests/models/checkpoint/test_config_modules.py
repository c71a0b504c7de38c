"""The modules of a sentence-transformers model: read in their order, or refused by name."""

import json
from pathlib import Path

import pytest

from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint.config import Module, read_modules, require_known_modules


def write(folder: Path, modules: object) -> Path:
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    return folder


def test_they_come_in_their_order_each_with_its_folder(tmp_path) -> None:
    write(
        tmp_path,
        [
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
            {"type": "pylate.models.Dense.Dense"},
        ],
    )
    assert read_modules(tmp_path) == [
        Module("Transformer", tmp_path),
        Module("Pooling", tmp_path / "1_Pooling"),
        Module("Dense", tmp_path),
    ]


def test_without_the_file_there_are_none_and_none_is_unknown(tmp_path) -> None:
    assert read_modules(tmp_path) == []
    require_known_modules(tmp_path, "Pooling")


def test_a_module_of_another_kind_is_named_with_those_that_are_known(tmp_path) -> None:
    write(tmp_path, [{"type": f"sentence_transformers.models.{each}"} for each in ("A", "B", "C")])
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
def test_what_cannot_be_meant_is_refused(tmp_path, modules, message) -> None:
    with pytest.raises(StartupError, match=message):
        read_modules(write(tmp_path, modules))
