"""The worker process, with the engines in this environment."""

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import worker
from benchmarks.adapters import Setting
from benchmarks.comparison import lowest_cosine
from benchmarks.worker import Encoded, EngineFailureError, Run
from tests.support.checkpoints import plain_corpus

TEXTS = plain_corpus(lines=5)


def measure(
    folder: Path,
    runs: list[Run],
    adapter: str = "smart_embedder",
    python: str = sys.executable,
    patience: float = 120,
) -> tuple[str, list[Encoded]]:
    engine = (Path(python), adapter, folder, "float32")
    return worker.measure(*engine, runs, patience=patience)


def test_texts_have_the_same_vectors_one_at_a_time(tiny_m3: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.npz" for name in ("together", "apart")}
    runs = [
        Run(TEXTS, Setting(2), apart, str(files[name]))
        for name, apart in (("together", False), ("apart", True))
    ]
    version, (together, apart) = measure(tiny_m3, runs)
    assert version == ""
    assert [len(together.seconds), len(apart.seconds)] == [1, len(TEXTS)]
    assert min(together.seconds + apart.seconds) > 0
    assert together.peak_bytes > 2**26
    vectors = {name: dict(np.load(file)) for name, file in files.items()}
    assert vectors["together"]["dense"].shape == (5, 64)
    for kind in ("dense", "colbert"):
        cosine = lowest_cosine(vectors["together"], vectors["apart"], kind)
        assert cosine == pytest.approx(1, abs=1e-5)


def test_an_engine_that_cannot_be_imported_is_an_error_of_one_line(tmp_path: Path) -> None:
    message = "ModuleNotFoundError: No module named 'm3serve'"
    with pytest.raises(EngineFailureError, match=message) as caught:
        measure(tmp_path, [Run(TEXTS, Setting())], "m3serve")
    assert len(str(caught.value).splitlines()) == 1


def test_a_worker_that_is_too_slow_is_an_error(tiny_m3: Path) -> None:
    with pytest.raises(EngineFailureError, match="no answer within 0 s"):
        measure(tiny_m3, [Run(TEXTS, Setting())], patience=0.01)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'cannot load a library' >&2; exit 3", "cannot load a library"),
        ("exit 3", "ended with exit code 3"),
        ("kill -KILL $$", r"ended by signal 9 \(out of memory\?\)"),
    ],
)
def test_a_worker_that_ends_early_is_an_error_with_its_last_line(
    tmp_path: Path, script: str, message: str
) -> None:
    program = tmp_path / "broken"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with pytest.raises(EngineFailureError, match=message):
        measure(tmp_path, [], python=str(program))
