"""A model is told from another by what its files hold, wherever they lie."""

import shutil
from pathlib import Path

import pytest

from app.errors import StartupError
from app.models.checkpoint.fingerprint import fingerprint


@pytest.fixture
def copy(tiny_m3: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_m3, tmp_path / "elsewhere" / "tiny-m3")


def test_the_same_files_elsewhere_are_the_same_model(tiny_m3: Path, copy: Path) -> None:
    (copy / "README.md").write_text("a text that no model reads")
    assert fingerprint(copy) == fingerprint(tiny_m3)


@pytest.mark.parametrize("name", ["model.safetensors", "sparse_linear.pt", "tokenizer.json"])
def test_one_other_byte_is_another_model(tiny_m3: Path, copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[-1] ^= 1
    (copy / name).write_bytes(content)
    assert fingerprint(copy) != fingerprint(tiny_m3)


def test_a_file_in_another_place_is_another_model(tiny_m3: Path, copy: Path) -> None:
    (copy / "config.json").rename(copy / "other.json")
    assert fingerprint(copy) != fingerprint(tiny_m3)


def test_a_model_from_the_hub_is_its_commit(tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    assert fingerprint(folder) == "0123abcd"


def test_a_file_that_cannot_be_read_stops_the_start(copy: Path) -> None:
    (copy / "extra.json").mkdir()
    with pytest.raises(StartupError, match="cannot be read"):
        fingerprint(copy)
