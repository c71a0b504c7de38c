"""Loading everything that the settings name."""

import shutil
from pathlib import Path

import psutil
import pytest

from smart_embedder.models.loader import load
from smart_embedder.settings import Settings

MAPS = Path("/proc/self/maps")


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell what is mapped")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_model_has_left_its_files_when_it_is_ready(
    dtype: str, tiny_m3: Path, tiny_qwen: Path, tiny_reranker: Path, tmp_path: Path
) -> None:
    folders = [
        shutil.copytree(each, tmp_path / each.name) for each in (tiny_m3, tiny_qwen, tiny_reranker)
    ]
    models = load(
        Settings(
            embedding_model=str(folders[0]),
            dense_embedding_model=str(folders[1]),
            reranker_model=str(folders[2]),
            device="cpu",
            dtype=dtype,
            hf_home=tmp_path,
        )
    )
    assert len(models.each) == 3
    assert str(tmp_path) not in MAPS.read_text()
    opened = [each.path for each in psutil.Process().open_files()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]
