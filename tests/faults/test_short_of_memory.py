"""Too little memory outside the model: 503 for the request that met it, and for no other."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from smart_embedder.api.formats import vectors
from smart_embedder.api.schemas import EmbeddingRequest
from tests.engine.fakes import FakeM3, loaded
from tests.support.in_process import served

STAGES = ["parsing", "tokenising", "rendering"]


def remember(enough: bool) -> None:
    if not enough:
        raise MemoryError


class ForgetfulModel(FakeM3):
    def tokenize(self, texts: list[str], *options: Any, **more: Any) -> Any:
        remember("tokenising" not in texts)
        return super().tokenize(texts, *options, **more)


async def test_a_stage_that_finds_no_memory_costs_its_own_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    validate_all, render_all = EmbeddingRequest.model_validate, vectors.render

    def validate(body: dict, **options: Any) -> EmbeddingRequest:
        remember("parsing" not in body["sentences"])
        return validate_all(body, **options)

    def render(answer: Any, **options: Any) -> Any:
        remember("rendering" not in answer.request.texts)
        return render_all(answer, **options)

    monkeypatch.setattr(EmbeddingRequest, "model_validate", validate)
    monkeypatch.setattr(vectors, "render", render)
    async with served(loaded(ForgetfulModel())) as (service, client):

        async def ask(text: str) -> Any:
            return await client.post("/embeddings/", json={"sentences": [text]})

        with capture_logs() as log:
            answers = await asyncio.gather(*map(ask, [*STAGES, "a", "b", "c"]))
        for answer in answers[:3]:
            assert (answer.status_code, answer.json()["code"]) == (503, "out_of_memory")
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["request_id"] == answer.headers["x-request-id"]
        assert [answer.status_code for answer in answers[3:]] == [200] * 3
        told = {"endpoint": "/embeddings/", "status": "error"}
        assert service.metrics.value("embedding_requests_total", **told) == 3
    assert [each["event"] for each in log].count("request_out_of_memory") == 3
