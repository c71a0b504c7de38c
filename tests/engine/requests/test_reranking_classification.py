"""The logits of a classifier, through the engine."""

from dataclasses import replace

import numpy as np
import pytest

from smart_embedder.engine import Engine, RerankRequest
from smart_embedder.engine.records import (
    CUT_AT_END,
    AnswerMemory,
    Outputs,
    TokenizedText,
    TruncationOptions,
)
from smart_embedder.engine.requests.reranking import ClassificationRequest
from smart_embedder.errors import InvalidRequestError, RerankerDisabledError, TextTooLongError
from smart_embedder.settings import Settings
from tests.engine.fakes import FakeModel, FakeReranker, loaded


class FakeClassifier(FakeReranker):
    """Of a text, its length and that of the second one; reads ten characters of both."""

    labels = ("first", "second")
    special_tokens = ([], [])

    def token_spans(self, text: str):
        raise NotImplementedError

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        raise NotImplementedError

    def tokenize_input(
        self, text: str, other: str | None, truncation: TruncationOptions = CUT_AT_END
    ) -> TokenizedText:
        whole = np.array([1] * len(text) + [2] * len(other or ""), np.int64)
        kept = whole[:10] if truncation.side == "right" else whole[-10:]
        return TokenizedText(kept, len(whole))

    def results(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        return [np.float32([(ids == 1).sum(), (ids == 2).sum()]) for ids in sequences]


def engine_for(reranker: FakeReranker | None) -> Engine:
    models = replace(loaded(FakeModel(), 100), reranker=reranker)
    return Engine(Settings(), lambda _: models)


async def classify(*inputs: tuple[str, str | None], reranker=None, **options):
    async with engine_for(reranker or FakeClassifier()) as engine:
        return await engine.classify(ClassificationRequest(inputs=[*inputs], **options))


async def test_each_input_has_its_logits_in_the_order_given_and_tokens_are_counted() -> None:
    reranker = FakeClassifier()
    result = await classify(("aaa", None), ("b", "cc"), reranker=reranker)
    assert [each.tolist() for each in result.logits] == [[3, 0], [1, 2]]
    assert result.labels == ("first", "second")
    assert (result.tokens, result.truncations) == (6, [])
    assert reranker.outputs == [[Outputs(logits=True)] * 2]
    assert result.timings.total >= result.timings.tokenize > 0


async def test_what_was_cut_is_reported_or_refused() -> None:
    inputs = [("a", None), ("b" * 8, "c" * 8)]
    result = await classify(*inputs, truncation=TruncationOptions(side="left"))
    (cut,) = result.truncations
    assert (cut.field, cut.index, cut.max_tokens, cut.original_tokens) == ("inputs", 1, 10, 16)
    assert (cut.side, result.logits[1].tolist()) == ("left", [2, 8])
    with pytest.raises(TextTooLongError, match="the text at index 1 has 16 tokens"):
        await classify(*inputs, truncation=TruncationOptions(truncate=False))


async def test_the_labels_of_all_inputs_count_towards_what_an_answer_may_hold() -> None:
    size = 8 * 6 + 4 * 2 * 2
    await classify(("aaa", None), ("b", "cc"), answer=AnswerMemory(size))
    with pytest.raises(InvalidRequestError, match="the labels of these 2 inputs need 64 bytes"):
        await classify(("aaa", None), ("b", "cc"), answer=AnswerMemory(size - 1))


async def test_a_model_without_labels_is_named_and_so_is_a_missing_one() -> None:
    with pytest.raises(InvalidRequestError, match="fake has no labels"):
        await classify(("a", None), reranker=FakeReranker())
    async with engine_for(None) as engine:
        with pytest.raises(RerankerDisabledError, match="there is no model with labels here"):
            await engine.classify(ClassificationRequest(inputs=[("a", None)]))


async def test_a_classifier_may_score_passages_too() -> None:
    async with engine_for(FakeClassifier()) as engine:
        assert len((await engine.rerank(RerankRequest("q", ["a"]))).scores) == 1
