"""Loading everything that the settings name."""

import gc
import shutil
import threading
from pathlib import Path

import pytest

from app.models.runtime import load
from app.settings import Settings

MAPS = Path("/proc/self/maps")


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell what is mapped")
def test_every_model_leaves_its_file_soon_after_the_start(
    tiny_m3: Path, tiny_reranker: Path, tmp_path: Path
) -> None:
    # Copies, because other tests hold theirs.
    embedder = shutil.copytree(tiny_m3, tmp_path / "embedder")
    reranker = shutil.copytree(tiny_reranker, tmp_path / "reranker")
    models = load(
        Settings(
            embedding_model=str(embedder),
            reranker_model=str(reranker),
            device="cpu",
            dtype="bfloat16",
            hf_home=tmp_path,
        )
    )
    for thread in threading.enumerate():
        if thread.name == "finish-loading":
            thread.join()
    gc.collect()
    assert len(models.each) == 2
    assert str(tmp_path) not in MAPS.read_text()
