"""What vectors will need, counted before they are made."""

import numpy as np
import pytest

from smart_embedder.engine.checks import AnswerMemory
from smart_embedder.engine.records import Outputs, TokenizedText
from smart_embedder.engine.requests.embedding import (
    EmbedRequest,
    Task,
    TaskResult,
    hold_vectors,
    vector_bytes,
)
from smart_embedder.errors import InvalidRequestError
from tests.engine.engines import engine_for
from tests.engine.fakes import FakeModel


def model() -> FakeModel:
    made = FakeModel()
    made.dense_width, made.colbert_width, made.states_width = 100, 10, 1000
    return made


@pytest.mark.parametrize(
    ("outputs", "nbytes"),
    [
        (Outputs(), 5 * 8),
        (Outputs(dense=True), 5 * 8 + 2 * 400),
        (Outputs(sparse=True), 5 * (8 + 12)),
        (Outputs(colbert=True), 5 * (8 + 40)),
        (Outputs(states=True), 5 * (8 + 4000)),
        (Outputs(True, True, True, True), 5 * (8 + 12 + 40 + 4000) + 2 * 400),
    ],
)
def test_each_kind_of_vectors_counts_for_each_token_or_text(outputs, nbytes) -> None:
    assert vector_bytes(model(), outputs, [2, 3]) == nbytes


def read(*lengths: int) -> list[TokenizedText]:
    return [TokenizedText(np.zeros(length, np.int64), length + 1) for length in lengths]


def test_the_vectors_of_all_models_are_held_together_or_refused_with_what_helps() -> None:
    tasks = [
        (Task(model(), Outputs(dense=True), ["a", "b"]), read(2, 3)),
        (Task(model(), Outputs(sparse=True), ["a", "b"]), read(4, 5)),
    ]
    size = 5 * 8 + 800 + 9 * 20
    hold_vectors(iter(tasks), AnswerMemory(size))
    with pytest.raises(InvalidRequestError, match=f"vectors of these 2 texts need {size} bytes"):
        hold_vectors(iter(tasks), AnswerMemory(size - 1))
    tasks.append((Task(model(), Outputs(colbert=True), ["a", "b"]), read(1, 1)))
    with pytest.raises(
        InvalidRequestError, match="of these 16 tokens need .* vector of each token"
    ):
        hold_vectors(iter(tasks), AnswerMemory(size))


def test_the_tokens_of_a_task_are_those_that_were_read() -> None:
    result = TaskResult(Task(model(), Outputs(), ["a", "b"]), read(2, 3), [])
    assert result.tokens == 5

    cuts = result.truncations(EmbedRequest(["a", "b"], Outputs()))
    assert [(cut.index, cut.original_tokens) for cut in cuts] == [(0, 3), (1, 4)]


async def test_a_prompt_counts_for_each_text_when_its_cost_is_estimated(monkeypatch) -> None:
    """It is tokenised with each: a long one makes many short texts a huge request."""
    made = model()
    async with engine_for(made) as engine:
        threads, seen = engine._pipelines.tokenizer_threads, []
        run = threads.run

        async def watched(call, texts, client):
            seen.append((texts, client))
            return await run(call, texts, client)

        monkeypatch.setattr(threads, "run", watched)
        made.default_prompt = "p: "
        await engine.embed(["a", "b"], client="me")
    assert seen == [(["a", "b", "p: ", "p: "], "me")]
