"""A loaded model is a copy: its files may be overwritten and truncated while it serves."""

import os
import shutil
from pathlib import Path

from smart_embedder.requests import EmbedRequest
from tests.smart_embedder.engines import engine_on_cpu


async def test_overwritten_and_truncated_weights_change_no_vectors(
    tiny_m3: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_m3, tmp_path / "m3")
    weights = folder / "model.safetensors"
    async with engine_on_cpu(folder) as engine:

        async def dense() -> bytes:
            (embedding,) = (await engine.embed(EmbedRequest(["hybrid search"]))).embeddings
            return embedding.dense.tobytes()

        expected = await dense()
        with weights.open("r+b") as file:
            file.write(bytes(weights.stat().st_size))
        assert await dense() == expected
        os.truncate(weights, 0)
        assert await dense() == expected
