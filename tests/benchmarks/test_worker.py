"""The worker, in a process of its own, with the engines that this environment has."""

import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest

from benchmarks.adapters.interface import Setting
from benchmarks.figures import worst_cosine
from benchmarks.worker import EngineFailureError, EngineProcess, engine_process
from tests.support.checkpoints import plain_corpus

TEXTS = plain_corpus(lines=5)


def worker(patience: float = 120) -> AbstractAsyncContextManager[EngineProcess]:
    return engine_process(Path(sys.executable), patience)


async def vectors(adapter: str, folder: Path, file: Path, **how: object) -> dict[str, np.ndarray]:
    async with worker() as engine:
        await engine.load(adapter, folder, "float32")
        encoded = await engine.encode(TEXTS, Setting(2), save=file, **how)
    assert len(encoded.seconds) == (len(TEXTS) if how else 1)
    assert min(encoded.seconds) > 0
    assert encoded.peak_bytes > 2**26
    with np.load(file) as arrays:
        return dict(arrays)


async def test_this_engine_and_flagembedding_agree_on_the_same_files(
    tiny_m3: Path, tmp_path: Path
) -> None:
    ours = await vectors("smart_embedder", tiny_m3, tmp_path / "ours.npz")
    theirs = await vectors("flag_embedding", tiny_m3, tmp_path / "theirs.npz")
    assert ours["dense"].shape == (5, 64)
    for kind in ("dense", "colbert"):
        assert worst_cosine(ours, theirs, kind) == pytest.approx(1, abs=1e-5)


async def test_one_text_at_a_time_gives_the_same_vectors_and_every_calls_time(
    tiny_m3: Path, tmp_path: Path
) -> None:
    together = await vectors("smart_embedder", tiny_m3, tmp_path / "together.npz")
    apart = await vectors("smart_embedder", tiny_m3, tmp_path / "apart.npz", one_at_a_time=True)
    np.testing.assert_allclose(apart["dense"], together["dense"], atol=1e-5)
    np.testing.assert_allclose(apart["colbert"], together["colbert"], atol=1e-5)


async def test_an_engine_that_is_not_installed_is_named(tiny_m3: Path) -> None:
    async with worker() as engine:
        with pytest.raises(EngineFailureError, match="No module named 'm3serve'"):
            await engine.load("m3serve", tiny_m3, "float32")


async def test_what_an_engine_raises_is_one_line(tmp_path: Path) -> None:
    async with worker() as engine:
        with pytest.raises(EngineFailureError) as caught:
            await engine.load("smart_embedder", tmp_path / "missing", "float32")
    assert len(str(caught.value).splitlines()) == 1


async def test_a_worker_answers_on_after_a_failure(tiny_m3: Path) -> None:
    async with worker() as engine:
        with pytest.raises(EngineFailureError, match="no engine is loaded"):
            await engine.encode(TEXTS, Setting())
        await engine.load("smart_embedder", tiny_m3, "float32")
        assert (await engine.encode(TEXTS, Setting())).seconds


async def test_a_worker_that_is_too_slow_is_given_up(tiny_m3: Path) -> None:
    async with worker(patience=0.01) as engine:
        with pytest.raises(EngineFailureError, match="no answer within"):
            await engine.load("smart_embedder", tiny_m3, "float32")


async def test_a_process_that_ends_early_is_told_by_its_last_words(tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_text("#!/bin/sh\necho 'cannot load a library' >&2\nexit 3\n")
    program.chmod(0o755)
    async with engine_process(program, patience=60) as engine:
        with pytest.raises(EngineFailureError, match="cannot load a library"):
            await engine.load("smart_embedder", tmp_path, "float32")
