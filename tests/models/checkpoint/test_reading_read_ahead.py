"""Weights that are on their way into the system's cache before anything reads them."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from smart_embedder.models.checkpoint.reading import read_ahead
from smart_embedder.settings import Settings

SIZE = 2**20


def is_cached(path: Path) -> bool:
    """Whether the whole file is in the system's cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), SIZE) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.byref(start), ctypes.c_size_t(SIZE), pages)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return all(page & 1 for page in pages)


def write_cold(path: Path) -> Path:
    """A file that is on the disk and not in the cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(SIZE))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if is_cached(path):
        pytest.skip("this file system keeps every file in memory")
    return path


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no file can be made cold here")
def test_folders_and_snapshots_of_the_hub_are_read(tmp_path: Path) -> None:
    wanted = [
        write_cold(tmp_path / "folder" / "pytorch_model.bin"),
        write_cold(tmp_path / "hub/models--a--reranker/snapshots/1f/model-00001.safetensors"),
    ]
    other = write_cold(tmp_path / "hub/models--a--reranker/snapshots/1f/onnx/model.onnx")
    settings = Settings(
        embedding_model=str(tmp_path / "folder"),
        reranker_model="a/reranker",
        hf_home=tmp_path,
    )
    read_ahead(settings).join()
    assert all(map(is_cached, wanted))
    assert not is_cached(other)


def test_what_cannot_be_read_is_left_to_the_loading(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    settings = Settings(embedding_model=str(tmp_path), reranker_model="none", hf_home=tmp_path)
    read_ahead(settings).join()
