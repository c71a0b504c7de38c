"""Reading files of models: refusing files that change, and reading weights ahead."""

import contextlib
import ctypes
import mmap
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smart_embedder.errors import StartupError
from smart_embedder.models.files.config import read_config
from smart_embedder.models.files.reading import (
    AT_ONCE,
    model_folders,
    read_ahead,
    read_file,
    refuse_changed_files,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.settings import EngineSettings

# A table that is read in three parts.
ROWS, WIDTH = AT_ONCE // 2, 5
SIZE = 2**20  # Bytes of a file that is read ahead.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) / 7
    save_file({"table": table, "other": table[:3].clone()}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_read_in_parts_is_rounded_as_a_whole(dtype: torch.dtype, folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")["table"]
    weights = Weights.read(folder)
    assert torch.equal(weights.get("table", ROWS, WIDTH, dtype=dtype), expected.to(dtype))
    assert torch.equal(weights.row("table", ROWS - 1), expected[-1])


@pytest.mark.skipif(sys.platform == "win32", reason="threads take turns there")
def test_threads_read_one_tensor_concurrently(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    expected = load_file(folder / "model.safetensors")["table"]
    weights = Weights.read(folder)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    met, preadv, readers = threading.Barrier(3, timeout=500), os.preadv, set()

    def meet_and_read(*arguments) -> int:
        if threading.get_ident() not in readers:
            readers.add(threading.get_ident())
            met.wait()
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", meet_and_read)
    assert torch.equal(weights.get("table", ROWS, WIDTH), expected)
    assert len(readers) == 3


def write_over(path: Path) -> None:
    """Overwrite a part of the file, and restore its time of modification."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"changed!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    new = path.with_name("new")
    shutil.copy(path, new)
    new.rename(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("change", [write_over, replace, cut, Path.unlink])
def test_file_changed_while_being_read_ends_the_loading(change, folder: Path) -> None:
    """A truncated file raises an error; a mapped file would kill the process by a signal."""

    def read() -> None:
        with refuse_changed_files():
            weights = Weights.read(folder)
            weights.get("other", 3, WIDTH)
            change(folder / "model.safetensors")
            weights.get("table", ROWS, WIDTH)

    with pytest.raises(StartupError, match="model.safetensors was changed while it was being read"):
        read()


def test_file_changed_between_two_devices_ends_the_loading(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')

    with ThreadPoolExecutor(1) as other, contextlib.suppress(StartupError), refuse_changed_files():
        read_config(tmp_path)
        write_over(path)
        again = other.submit(copy_context().run, read_config, tmp_path)
        with pytest.raises(StartupError, match="changed while it was being read"):
            again.result()


def test_too_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(OSError, match="at most"):
        read_file(path)
    with pytest.raises(StartupError, match="cannot be read: it has"):
        read_config(tmp_path)


def is_cached(path: Path) -> bool:
    """Return whether the whole file is in the system's cache."""
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
    """Write a file that is on disk and not in the cache."""
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
def test_read_ahead_fills_the_cache_from_folders_and_hub_snapshots(tmp_path: Path) -> None:
    weights = [
        write_cold(tmp_path / "folder" / "pytorch_model.bin"),
        write_cold(tmp_path / "hub/models--a--reranker/snapshots/1f/model-00001.safetensors"),
    ]
    other = write_cold(tmp_path / "hub/models--a--reranker/snapshots/1f/onnx/model.onnx")
    settings = EngineSettings(
        embedding_model=str(tmp_path / "folder"),
        reranker_model="a/reranker",
        hf_home=tmp_path,
    )
    read_ahead(model_folders(settings)).join()
    assert all(map(is_cached, weights))
    assert not is_cached(other)


def test_read_ahead_ignores_errors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    settings = EngineSettings(
        embedding_model=str(tmp_path), reranker_model="none", hf_home=tmp_path
    )
    read_ahead(model_folders(settings)).join()
