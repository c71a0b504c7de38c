"""What vectors will need, counted before they are made."""

import numpy as np
import pytest

from smart_embedder.engine.records import AnswerMemory, EmbedRequest, Outputs, TokenizedText
from smart_embedder.engine.requests.embedding import (
    Task,
    hold_vectors,
    truncations_of,
    vector_bytes,
)
from smart_embedder.errors import InvalidRequestError
from tests.engine.engines import engine_for
from tests.engine.fakes import FakeModel, loaded


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


def done(outputs: Outputs, *lengths: int) -> Task:
    """A task that has read texts of so many tokens, of which each had one more."""
    embedder = model()
    task = Task(loaded(embedder), embedder, outputs, ["a", "b"])
    task.read = [TokenizedText(np.zeros(length, np.int64), length + 1) for length in lengths]
    return task


def test_the_vectors_of_all_models_are_held_together_or_refused_with_what_helps() -> None:
    tasks = [done(Outputs(dense=True), 2, 3), done(Outputs(sparse=True), 4, 5)]
    size = 5 * 8 + 800 + 9 * 20
    hold_vectors(tasks, AnswerMemory(size))
    with pytest.raises(InvalidRequestError, match=f"vectors of these 2 texts need {size} bytes"):
        hold_vectors(tasks, AnswerMemory(size - 1))
    tasks.append(done(Outputs(colbert=True), 1, 1))
    with pytest.raises(
        InvalidRequestError, match="of these 16 tokens need .* vector of each token"
    ):
        hold_vectors(tasks, AnswerMemory(size))


def test_the_texts_that_were_cut_are_those_of_every_task() -> None:
    cuts = truncations_of([done(Outputs(), 2, 3)], EmbedRequest(["a", "b"]))
    assert [(cut.index, cut.original_tokens) for cut in cuts] == [(0, 3), (1, 4)]


async def test_a_prompt_counts_for_each_text_when_its_cost_is_estimated(monkeypatch) -> None:
    """It is tokenised with each: a long one makes many short texts a huge request."""
    made = model()
    async with engine_for(made) as engine:
        threads, seen = engine._tokenizer_threads, []
        run = threads.run

        async def watched(call, texts, client):
            seen.append((texts, client))
            return await run(call, texts, client)

        monkeypatch.setattr(threads, "run", watched)
        made.default_prompt = "p: "
        await engine.embed(EmbedRequest(["a", "b"], client="me"))
    assert seen == [(["a", "b", "p: ", "p: "], "me")]
