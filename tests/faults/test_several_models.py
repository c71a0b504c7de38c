"""Two real models that do not fit into the memory together are both answered, also under load.

A model whose files are gone or damaged is refused in one sentence (503 `model_not_loaded`). Another
model's files, in the folder of one that was unloaded, are that model from then on.
"""

import asyncio
import json
import shutil
from itertools import chain
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from tests.support.memory import status_bytes
from tests.support.server import RunningServer, run_server

# So many that half a table is far more than what the allocator keeps of answers and of modules
# that are imported for the first model.
ROWS = 600_000
WIDTH = 64
# In float32, as the model is computed; the table is copied from its file, which is in float16.
TABLE_BYTES = ROWS * WIDTH * 4
THRESHOLD = 0.9
SENTENCES = ["bread and music", "hybrid search"]


def with_large_table(model: Path, folder: Path, seed: int) -> None:
    """The same model with other vectors and a vocabulary that nearly all of its bytes are.

    Its table is the last of its file, and a hole in it from the first word that is not known.
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


class LimitedServer:
    """A server whose memory holds one and a half of the models `one` and `two`."""

    def __init__(self, server: RunningServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.used_at_the_start = status_bytes(server.process.pid, "RssAnon")
        self.set_limit(1.5 * TABLE_BYTES)

    def set_limit(self, for_models: float) -> None:
        limit = int((self.used_at_the_start + for_models) / THRESHOLD)
        (self.folder / "new").write_text(str(limit))
        (self.folder / "new").rename(self.folder / "limit")

    def states(self) -> dict[str, str]:
        models = httpx2.get(f"{self.server.url}/health").json()["served_models"]
        return {each["name"]: each["state"] for each in models}

    async def ask(self, client: httpx2.AsyncClient, model: str | None) -> httpx2.Response:
        """Ask, and again after `Retry-After` where the model was not there in time."""
        while True:
            answer = await client.post("/embeddings/", json=body(model))
            code = None if answer.status_code == 200 else answer.json()["code"]
            if code != "loading":
                return answer
            await asyncio.sleep(int(answer.headers["Retry-After"]))


def body(model: str | None) -> dict:
    return {
        "sentences": SENTENCES,
        "return_sparse": False,
        "return_colbert": False,
        "model": model,
    }


def dense(answer: httpx2.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([each["embeddings"]["dense"] for each in answer.json()["data"]])


@pytest.fixture(scope="module")
def limited(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("limited")
    for seed, name in enumerate(("one", "two")):
        with_large_table(tiny_m3, folder / name, seed)
    shutil.copytree(tiny_m3, folder / "damaged")
    (folder / "damaged" / "model.safetensors").write_bytes(b"no weights")
    names = ("one", "two", "damaged")
    (folder / "models.yaml").write_text("".join(f"- name: {folder / each}\n" for each in names))
    settings = {
        "EMBEDDING_MODEL": str(tiny_m3),
        "MODELS": "models.yaml",
        "MODEL_MEMORY_THRESHOLD": str(THRESHOLD),
        "LIMIT": str(folder / "limit"),
    }
    # Of a copy of the template, part of what is in use is the template's.
    with run_server(folder, "tests.faults.limited_server", fresh=True, **settings) as server:
        yield LimitedServer(server, folder)


@pytest.fixture(scope="module")
def expected(limited: LimitedServer) -> dict[str | None, np.ndarray]:
    """The vectors of each model, asked for alone."""

    async def ask() -> dict[str | None, np.ndarray]:
        async with limited.server.async_client() as client:
            return {each: dense(await limited.ask(client, each)) for each in (None, "one", "two")}

    return asyncio.run(ask())


async def test_one_that_is_in_use_makes_room_and_comes_back(limited, expected) -> None:
    """Requests for it are in work all the time, and every one is answered."""
    ended = asyncio.Event()

    async with limited.server.async_client() as client:

        async def ask_again_and_again() -> list[np.ndarray]:
            answers = []
            while not ended.is_set():
                answers.append(dense(await limited.ask(client, "one")))
            return answers

        await limited.ask(client, "one")
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(ask_again_and_again()) for _ in range(4)]
            other = await limited.ask(client, "two")
            ended.set()
    np.testing.assert_allclose(dense(other), expected["two"], atol=1e-6)
    for answer in chain.from_iterable(task.result() for task in asking):
        np.testing.assert_allclose(answer, expected["one"], atol=1e-5)


async def test_a_folder_that_was_removed_damaged_or_replaced_while_it_was_unloaded(
    limited, expected, tiny_m3: Path
) -> None:
    """Another model's files are that model from then on; without files it is one sentence."""
    one, two = limited.folder / "one", limited.folder / "two"
    async with limited.server.async_client() as client:
        dense(await limited.ask(client, "two"))
        shutil.rmtree(one)
        for name in ("one", "damaged"):
            refused = await client.post("/embeddings/", json=body(name))
            assert (refused.status_code, refused.json()["code"]) == (503, "model_not_loaded")
            assert 0 < int(refused.headers["Retry-After"]) <= 30
            assert (limited.states()[name], limited.states()["two"]) == ("failed", "ready")
        limited.server.wait_for_line("reason='the weights in ")
        limited.set_limit(0)  # No model has room, so that an idle one is unloaded after work.
        while limited.states()["two"] == "ready":
            dense(await client.post("/embeddings/", json=body(None)))
        limited.set_limit(2 * TABLE_BYTES)
        shutil.rmtree(two)
        shutil.copytree(tiny_m3, two)
        other = await limited.ask(client, "two")
        np.testing.assert_allclose(dense(other), expected[None], atol=1e-6)
        assert other.json()["model_name"] == "two"
        limited.server.wait_for_line("model_files_replaced")
        assert limited.server.metric('embedder_model_replacements_total{model="two"}') == 1
