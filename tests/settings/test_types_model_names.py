"""What a model is called in public: where its folder lies is never told."""

from pathlib import Path

import pytest

from smart_embedder.settings.types import public_name


@pytest.mark.parametrize("name", ["BAAI/bge-m3", "bge-m3", "late-interaction", "none"])
def test_a_hub_id_or_a_keyword_is_its_own_name(name: str) -> None:
    assert public_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "/home/me/models/bge-m3",
        "/home/me/models/bge-m3/",
        "/home/me/models/bge-m3//",
        "/home/me/models/other/../bge-m3",
        "./bge-m3",
        "../models/bge-m3/",
        "~/models/bge-m3",
        "models/of/mine/bge-m3",
        "C:\\models\\bge-m3",
        "https://user:secret@hub.example/models/bge-m3",
    ],
)
def test_a_folder_is_called_by_the_last_part_of_its_path(name: str) -> None:
    assert public_name(name) == "bge-m3"


def test_a_folder_that_looks_like_a_hub_id_is_a_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "my-bge").mkdir(parents=True)
    assert public_name("there/my-bge") == "my-bge"
    assert public_name("there/another") == "there/another"


def test_the_folder_that_one_stands_in_has_a_name_too(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "my-bge").mkdir()
    monkeypatch.chdir(tmp_path / "my-bge")
    public_name.cache_clear()
    assert public_name(".") == "my-bge"
    assert public_name("/") == "model"
    public_name.cache_clear()
