"""Two models that do not fit into the memory together both serve, also under load.

The memory is that of a real process; tests/smart_embedder/devices/test_memory.py simulates it.
"""

import asyncio
import json
import shutil
from pathlib import Path

import httpx2
import numpy as np
import torch
from safetensors.torch import load_file, save

from tests.support.memory import status_bytes
from tests.support.server import run_server

# So many that half of a table is far more than the memory that the allocator keeps, and that of
# modules that are imported with the first model.
ROWS = 400_000
WIDTH = 64
# In float32, the format of the model; the file is in float16.
TABLE_BYTES = ROWS * WIDTH * 4
THRESHOLD = 0.9
SENTENCES = ["bread and music", "hybrid search"]


def with_large_table(model: Path, folder: Path, seed: int) -> None:
    """Copy a model with other vectors, and a vocabulary that makes up nearly all of its bytes.

    The table is the last tensor in the file, which is sparse from the first unknown word on.
    """
    shutil.copytree(model, folder)
    half = {n: tensor.half() for n, tensor in load_file(folder / "model.safetensors").items()}
    name = next(name for name in half if name.endswith("word_embeddings.weight"))
    table = half.pop(name)
    torch.manual_seed(seed)
    table += 0.05 * torch.randn_like(table)
    content = save(half, {"format": "pt"})
    start = 8 + int.from_bytes(content[:8], "little")
    header, others = json.loads(content[8:start]), content[start:]
    end = len(others) + ROWS * WIDTH * 2
    about = {"dtype": "F16", "shape": [ROWS, WIDTH], "data_offsets": [len(others), end]}
    head = json.dumps(header | {name: about}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head + others + table.numpy().tobytes())
        file.truncate(8 + len(head) + end)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": ROWS}), "utf-8")


async def ask(client: httpx2.AsyncClient, model: str) -> np.ndarray:
    """Embed with a model; while it is not loaded, retry after `Retry-After`."""
    body = {"sentences": SENTENCES, "return_sparse": False, "return_colbert": False, "model": model}
    while True:
        answer = await client.post("/embeddings/", json=body)
        if answer.status_code == 200:
            return np.array([item["embeddings"]["dense"] for item in answer.json()["data"]])
        assert answer.json()["code"] == "loading", answer.text
        await asyncio.sleep(int(answer.headers["Retry-After"]))


async def test_busy_model_is_unloaded_for_another_and_loaded_again(
    tiny_m3: Path, tmp_path: Path
) -> None:
    """Requests for the busy model run all the time, and all are answered."""
    limit = tmp_path / "limit"
    for seed, name in enumerate(("one", "two")):
        with_large_table(tiny_m3, tmp_path / name, seed)
    entries = [f"- name: {tmp_path / name}\n" for name in ("one", "two")]
    (tmp_path / "models.yaml").write_text("".join(entries))
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "MODELS": "models.yaml", "LIMIT": str(limit)}
    settings["MODEL_MEMORY_THRESHOLD"] = str(THRESHOLD)
    with run_server(tmp_path, "tests.faults.limited_server", **settings) as server:
        used = status_bytes(server.process.pid, "RssAnon")
        # One and a half of the models fit.
        limit.write_text(str(int((used + 1.5 * TABLE_BYTES) / THRESHOLD)))
        async with server.async_client() as client:
            two, one = await ask(client, "two"), await ask(client, "one")
            ended = asyncio.Event()

            async def ask_again_and_again() -> None:
                while not ended.is_set():
                    np.testing.assert_allclose(await ask(client, "one"), one, atol=1e-5)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(4):
                    tasks.create_task(ask_again_and_again())
                np.testing.assert_allclose(await ask(client, "two"), two, atol=1e-6)
                ended.set()
        for name in ("one", "two"):
            assert server.metric(f'embedder_model_unloads_total{{model="{name}"}}') >= 1
    assert not np.allclose(one, two, atol=1e-3)
