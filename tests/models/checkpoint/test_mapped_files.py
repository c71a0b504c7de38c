"""Files that weights are mapped from: writing to one is noticed, renaming over it is harmless."""

import gc
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from app.errors import StartupError
from app.models.checkpoint.mapped_files import MappedFiles
from app.models.checkpoint.weights import Weights

OPEN_FILES = Path("/proc/self/fd")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights " * 1000)
    os.utime(path, ns=(10**18, 10**18))
    return path


@pytest.fixture
def files(path: Path) -> Iterator[MappedFiles]:
    files = MappedFiles([("m3/model.safetensors", path)])
    yield files
    files.close()


def overwrite(path: Path) -> None:
    """In place, with as many bytes."""
    with path.open("r+b") as file:
        file.write(b"WEIGHTS")


def append(path: Path) -> None:
    """And set the time back, as some tools do."""
    with path.open("ab") as file:
        file.write(b"more")
    os.utime(path, ns=(10**18, 10**18))


def truncate(path: Path) -> None:
    os.truncate(path, 100)


@pytest.mark.parametrize("change", [overwrite, append, truncate])
def test_a_file_that_is_written_to_is_noticed(files: MappedFiles, path: Path, change) -> None:
    assert files.changed() is None
    change(path)
    assert files.changed() == "m3/model.safetensors"
    with pytest.raises(StartupError, match="model.safetensors was changed while it was being load"):
        files.require_unchanged()


def replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(b"other")
    new.rename(path)


def move_away(path: Path) -> None:
    path.rename(path.with_name("old"))


@pytest.mark.parametrize("change", [replace, move_away, Path.unlink, Path.read_bytes])
def test_a_file_that_is_replaced_by_renaming_or_read_is_harmless(
    files: MappedFiles, path: Path, change
) -> None:
    change(path)
    assert files.changed() is None


def test_a_file_that_was_renamed_is_watched_all_the_same(files: MappedFiles, path: Path) -> None:
    move_away(path)
    overwrite(path.with_name("old"))
    assert files.changed() == "m3/model.safetensors"


@pytest.mark.parametrize("change", [replace, Path.unlink])
def test_a_file_that_is_replaced_while_it_is_loaded_stops_the_start(
    files: MappedFiles, path: Path, change
) -> None:
    """What is mapped may then be another file than the one that is watched."""
    files.require_unchanged()
    change(path)
    with pytest.raises(StartupError, match="start again"):
        files.require_unchanged()


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="the system does not tell what is mapped")
def test_what_is_not_mapped_any_more_is_not_watched(files: MappedFiles, path: Path) -> None:
    gc.collect()  # What other tests have left open is not counted.
    before = len(list(OPEN_FILES.iterdir()))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        files.forget_unmapped()
        assert files.names == ["m3/model.safetensors"]
    files.forget_unmapped()
    assert files.names == []
    overwrite(path)
    assert files.changed() is None
    assert len(list(OPEN_FILES.iterdir())) == before - 1


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="the system does not tell what is open")
def test_no_file_stays_open_when_nobody_watches(path: Path) -> None:
    gc.collect()  # What other tests have left open is not counted.
    before = len(list(OPEN_FILES.iterdir()))
    files = MappedFiles([("a", path), ("b", path), ("absent", path.with_name("absent"))])
    assert files.names == ["a", "b"]
    del files
    gc.collect()
    assert len(list(OPEN_FILES.iterdir())) == before


def test_a_link_is_followed(path: Path, tmp_path: Path) -> None:
    """As in the hub's cache, whose snapshots are links."""
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    files = MappedFiles([("m3", link)])
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        files.forget_unmapped()
        assert files.names == ["m3"]
    overwrite(path)
    assert files.changed() == "m3"
    files.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system shows no pages")
def test_pages_that_are_given_back_are_read_again_from_the_file(tmp_path: Path) -> None:
    tensors = {name: torch.randn(300, 1000) for name in "ab"}
    one, another = tmp_path / "one", tmp_path / "another"
    one.mkdir()
    save_file(tensors, one / "model.safetensors")
    weights, others = Weights.read(one), Weights.read(shutil.copytree(one, another))
    for read in (weights, others):
        for name, tensor in tensors.items():
            assert torch.equal(read.get(name, 300, 1000), tensor)
    assert resident_kib(one / "model.safetensors") > 2000
    weights.give_back_pages()
    assert resident_kib(one / "model.safetensors") == 0
    assert resident_kib(another / "model.safetensors") > 2000
    for name, tensor in tensors.items():
        assert torch.equal(weights.get(name, 300, 1000), tensor)


def resident_kib(path: Path) -> int:
    """How much of a mapped file the process holds."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(f" {path}")]
    assert starts
    sizes = [next(line for line in lines[start:] if line.startswith("Rss:")) for start in starts]
    return sum(int(size.split()[1]) for size in sizes)
