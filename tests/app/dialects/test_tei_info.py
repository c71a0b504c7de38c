"""/info, /health and /ping of text-embeddings-inference's API, also while models are loading."""

import os
from dataclasses import replace
from typing import Any

import pytest
from httpx2 import ASGITransport, AsyncClient

from app.main import create_app
from app.settings import Settings
from smart_embedder.interface import ModelInfo
from tests.smart_embedder.fakes import FakeModel, FakeReranker, loaded
from tests.smart_embedder.further_models import FakeLoader, entries
from tests.support.in_process import served


@pytest.fixture
def client() -> AsyncClient:
    """A client of a service whose models are not loaded yet."""
    app: Any = create_app(Settings(api_token=None, embedding_model="own/bge"))
    return AsyncClient(transport=ASGITransport(app), base_url="http://service")


UNHEALTHY = {"error": "loading: the models are being loaded", "error_type": "Unhealthy"}


async def test_ping_and_info_are_503_while_models_are_loading(client) -> None:
    for path in ("/ping", "/models/own/bge/ping", "/models/own/bge/health"):
        assert (await client.head(path)).status_code == 503
        answer = await client.get(path)
        assert (answer.status_code, answer.json()) == (503, UNHEALTHY)
    for path, status, retry_after in (
        ("/info", 503, "5"),
        ("/models/own/bge/info", 503, "5"),
        ("/models/other/ping", 404, None),
        ("/models/other/info", 404, None),
    ):
        answer = await client.get(path)
        assert (answer.status_code, answer.headers.get("retry-after")) == (status, retry_after)
        assert (answer.json()["error_type"] == "Unhealthy") == (status == 503)


class Dense(FakeModel):
    name = "own/dense"
    max_length = 77
    pooling = "last_token"


class Judge(FakeReranker):
    name = "own/judge"
    max_length = 55


def models(judge: FakeReranker) -> Any:
    info = (ModelInfo("own/judge", "bfloat16", {}),)
    return replace(loaded(FakeModel(), 640), dense=Dense(), reranker=judge, infos=info)


NAMES = {
    "embedding_model": "own/bge",
    "dense_embedding_model": "own/dense",
    "reranker_model": "own/judge",
}


async def get_info(client: AsyncClient, path: str) -> dict[str, Any]:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    info: dict[str, Any] = answer.json()
    return info


async def test_info_describes_the_loaded_model_of_each_role() -> None:
    settings = NAMES | {"dense_model_revision": "abc", "tokenizer_threads": 3}
    limits = {"max_queue_size": 9, "max_requests_in_batch": 8, "max_sentences_per_request": 7}
    async with served(models(Judge()), **settings, **limits) as (_, client):
        for path in ("/ping", "/models/own/judge/health"):
            answer = await client.get(path)
            assert (answer.status_code, answer.content) == (200, b"")
        root = await get_info(client, "/info")
        assert await get_info(client, "/models/own/dense/info") == root
        embedder = await get_info(client, "/models/own/bge/info")
        judge = await get_info(client, "/models/own/judge/info")
    assert root.pop("version")
    assert root == {
        "model_id": "own/dense",
        "model_sha": "abc",
        "model_dtype": "float32",
        "served_model_name": "own/dense",
        "model_type": {"embedding": {"pooling": "last_token"}},
        "max_concurrent_requests": 9,
        "max_input_length": 77,
        "max_batch_tokens": 640,
        "max_batch_requests": 8,
        "max_client_batch_size": 7,
        "auto_truncate": True,
        "tokenization_workers": 3,
        "vector_space": {},
    }
    assert (embedder["model_id"], embedder["model_sha"]) == ("own/bge", None)
    assert embedder["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (judge["max_input_length"], judge["model_dtype"]) == (55, "bfloat16")
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    assert judge["model_type"] == {"reranker": labels}


async def test_info_has_the_labels_of_a_reranker() -> None:
    judge = Judge()
    judge.labels = ("no", "yes")
    async with served(models(judge), **NAMES) as (_, client):
        info = await get_info(client, "/models/own/judge/info")
    labels = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
    assert info["model_type"] == {"reranker": labels}
    assert info["tokenization_workers"] == os.cpu_count()


async def test_info_describes_a_model_of_models_while_it_is_loaded() -> None:
    further = {"loader": FakeLoader(), "models": entries("own/further")}
    default = loaded(FakeModel(), 100)
    async with served(default, **further, model_memory_threshold=1.0) as (service, client):
        path = "/models/own/further/info"
        refused = await client.get(path)
        assert refused.status_code == 503
        assert "own/further is not loaded now" in refused.json()["error"]
        await service.engine.load("own/further")
        assert (await get_info(client, path))["model_id"] == "own/further"
