"""What is refused: kinds not made, options without effect, and texts that may not be cut."""

import asyncio
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from smart_embedder.engine.checks import (
    check_rendering,
    check_truncations,
    pair_truncations,
    text_truncations,
)
from smart_embedder.engine.records import (
    CUT_AT_END,
    DENSE,
    EmbedRequest,
    Outputs,
    RerankRequest,
    TextEmbedding,
    TokenizedPair,
    TokenizedText,
    Truncation,
    TruncationOptions,
)
from smart_embedder.errors import InvalidRequestError, KindNotMadeError, TextTooLongError
from smart_embedder.settings.types import MAX_PROMPT_CHARACTERS
from tests.engine.engines import engine_for, hold, let_go, queued
from tests.engine.fakes import ALL, FakeM3, FakeModel, FakeQwen, FakeReranker

LEFT = TruncationOptions(side="left")
REFUSE = TruncationOptions(truncate=False)


def text(kept: int, had: int, *, exact: bool = True) -> TokenizedText:
    return TokenizedText(np.zeros(kept, np.int64), had, exact)


def test_the_texts_that_were_cut_are_reported_with_their_place_and_side() -> None:
    texts = [text(3, 3), text(3, 9), text(0, 0), text(2, 7, exact=False)]
    assert text_truncations(FakeModel(), texts, "inputs", "left") == [
        Truncation("inputs", 1, "fake", 3, 9, "left"),
        Truncation("inputs", 3, "fake", 2, 7, "left", exact=False),
    ]


def pair(query: tuple[int, int], passage: tuple[int, int], **exact: bool) -> TokenizedPair:
    return TokenizedPair(np.zeros(1, np.int64), query[1], query[0], passage[1], passage[0], **exact)


def test_a_query_is_reported_once_by_the_pair_that_cut_it_most_and_passages_each() -> None:
    pairs = [
        pair((5, 8), (4, 4)),
        pair((2, 8), (3, 6), query_exact=False, passage_exact=False),
        pair((8, 8), (1, 2)),
    ]
    assert pair_truncations(FakeReranker(), pairs, "left") == [
        Truncation("query", 0, "fake", 2, 8, exact=False),
        Truncation("passages", 1, "fake", 3, 6, "left", exact=False),
        Truncation("passages", 2, "fake", 1, 2, "left"),
    ]
    assert pair_truncations(FakeReranker(), [pair((8, 8), (4, 4))], "right") == []


def test_a_refusal_tells_of_the_first_in_words_and_of_ten_at_most() -> None:
    check_truncations([], REFUSE)
    cuts = [Truncation("sentences", number, "m", 8, 11) for number in range(4, 30)]
    check_truncations(cuts, TruncationOptions())
    with pytest.raises(TextTooLongError) as refused:
        check_truncations(cuts, REFUSE)
    assert str(refused.value).startswith(
        "the text at index 4 has 11 tokens, and m reads at most 8 of it: shorten it"
    )
    pointers = [problem["pointer"] for problem in refused.value.problems]
    assert pointers == [f"/sentences/{number}" for number in range(4, 14)]
    with pytest.raises(TextTooLongError, match="the query has at least 11 tokens") as refused:
        check_truncations([Truncation("query", 0, "m", 8, 11, exact=False)], REFUSE)
    assert refused.value.problems[0]["pointer"] == "/query"


SPARSE = Outputs(sparse=True)
POOLED = {"colbert_pool_factor": 2}


@pytest.mark.parametrize(
    ("outputs", "asked", "message"),
    [
        (SPARSE, {"output_dtype": "int8"}, "output_dtype has no effect"),
        (DENSE, POOLED, "without ColBERT vectors"),
        (ALL, POOLED | {"input_type": "query"}, "these are queries"),
        (ALL, POOLED | {"muvera": "query"}, "these are queries"),
        (ALL, POOLED | {"return_tokens": True}, "exclude each other"),
        (DENSE, {"output_dtype": "int8", "input_type": "query", "return_tokens": True}, None),
        (ALL, POOLED | {"output_dtype": "int8", "muvera": "document"}, None),
        (SPARSE, {"return_tokens": True}, None),
    ],
)
def test_what_is_made_of_vectors_must_have_an_effect(outputs, asked, message) -> None:
    request = EmbedRequest([], outputs, **asked)
    if message is None:
        check_rendering(request)
    else:
        with pytest.raises(InvalidRequestError, match=message):
            check_rendering(request)


class FakeDense(FakeModel):
    """Makes dense vectors alone, of any length."""

    name = "fake-dense"
    kinds = Outputs(dense=True, states=True)
    normalizes = False

    def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
        return [TextEmbedding(dense=np.float32([3, 4, 0, 0])) for _ in sequences]


class FakeSparse(FakeModel):
    name = "fake-sparse"
    kinds = Outputs(sparse=True)


async def test_a_kind_that_is_not_made_is_refused_and_the_models_are_named() -> None:
    async with engine_for(FakeSparse(), dense=FakeDense()) as engine:
        with pytest.raises(KindNotMadeError) as caught:
            await engine.embed(EmbedRequest(["ab"], ALL))
        with pytest.raises(KindNotMadeError, match="dense vectors are not made here"):
            await engine.embed(EmbedRequest(["ab"], model="BAAI/bge-m3"))
        with pytest.raises(InvalidRequestError, match="nothing is asked for"):
            await engine.embed(EmbedRequest(["ab"], Outputs()))
    assert str(caught.value) == (
        "ColBERT vectors are not made here: fake-dense and fake-sparse make dense vectors, sparse "
        "vectors, vectors of tokens"
    )


async def test_a_prompt_is_for_the_model_that_makes_dense_vectors() -> None:
    embedder, dense = FakeM3(), FakeQwen()
    async with engine_for(embedder, dense=dense) as engine:
        await engine.embed(EmbedRequest(["ab"], ALL, input_type="query"))
        assert (dense.batches, embedder.batches) == ([[8]], [[2]])
        await engine.embed(EmbedRequest(["ab"], ALL, prompt_name="code"))
        assert dense.batches[1:] == [[6]]
        await engine.embed(EmbedRequest(["ab"], ALL, prompt="to be read: "))
        assert dense.batches[2:] == [[14]]
        await engine.embed(EmbedRequest(["ab"], ALL, input_type="document"))
        assert dense.batches[3:] == [[2]]
    assert embedder.batches == [[2]] * 4


async def test_a_prompt_is_for_all_kinds_where_one_model_makes_them() -> None:
    embedder = FakeM3()
    async with engine_for(embedder) as engine:
        result = await engine.embed(
            EmbedRequest(
                ["ab"], Outputs(sparse=True, colbert=True), prompt="x: ", return_tokens=True
            )
        )
    assert embedder.batches == [[5]]
    assert result.token_strings[0].colbert == [":", " ", "a", "b"]


@pytest.mark.parametrize(
    ("prompts", "asked", "read"),
    [
        # By the names in use; a model without one takes the type all the same.
        ({"query": "p"}, {"input_type": "query"}, 1),
        ({"passage": "p"}, {"input_type": "document"}, 1),
        ({"corpus": "p"}, {"input_type": "document"}, 1),
        ({}, {"input_type": "query"}, 0),
        ({}, {"input_type": "document"}, 0),
        # A preferred one comes before that of the type.
        (FakeQwen.prompts, {"preferred_prompts": ("code",), "input_type": "query"}, 4),
        (FakeQwen.prompts, {"preferred_prompts": ("x", "code")}, 4),
        (FakeQwen.prompts, {"preferred_prompts": ("x",), "input_type": "query"}, 6),
        (FakeQwen.prompts, {"preferred_prompts": ("x",)}, 0),
        # The shortest, and the longest, of which with its text 100 tokens are read.
        ({}, {"prompt": "x"}, 1),
        ({}, {"prompt": "x" * MAX_PROMPT_CHARACTERS}, 98),
    ],
)
async def test_a_prompt_is_given_or_found_by_the_type_of_texts(prompts, asked, read) -> None:
    embedder = FakeM3()
    embedder.prompts = prompts
    async with engine_for(embedder) as engine:
        await engine.embed(EmbedRequest(["ab"], **asked))
    assert embedder.batches == [[2 + read]]


REST = Outputs(sparse=True, colbert=True)
NO_EFFECT = [
    ({"dimensions": 2}, ALL, "fake-m3 was not trained for fewer than its 4 dimensions"),
    ({"dimensions": 4}, REST, "dimensions has no effect without dense vectors"),
    ({"dimensions": 5}, ALL, "dimensions is 5, and a vector of fake-m3 has 4: leave it out"),
    ({"prompt_name": "query"}, ALL, "prompt_name is unknown to fake-m3: it has no prompts"),
    ({"prompt": ""}, ALL, "prompt has 0 characters"),
    ({"prompt": "x" * (MAX_PROMPT_CHARACTERS + 1)}, ALL, "prompt has 4097 characters: send 1 to"),
    ({"return_tokens": True}, DENSE, "no effect on dense vectors"),
    ({"prompt": "a", "input_type": "query"}, ALL, "prompt and input_type exclude each other"),
    ({"prompt": "a", "preferred_prompts": ("b",)}, ALL, "prompt and input_type exclude each other"),
]
NO_EFFECT_ON_QWEN = [
    ({"dimensions": 1}, ALL, "dimensions is 1: fake-qwen gives 2 to 4"),
    ({"dimensions": 5}, ALL, "dimensions is 5, and a vector of fake-qwen has 4: leave it out"),
    ({"prompt_name": "none"}, ALL, "unknown to fake-qwen: it has query, document, code"),
    ({"prompt": "a"}, REST, "prompt has no effect without dense vectors: it is for"),
]


@pytest.mark.parametrize(
    ("dense", "options", "kinds", "message"),
    [
        *((None, *case) for case in NO_EFFECT),
        *((FakeQwen(), *case) for case in NO_EFFECT_ON_QWEN),
    ],
)
async def test_an_option_without_effect_is_refused_and_said_why(
    dense, options, kinds, message
) -> None:
    async with engine_for(FakeM3(), dense=dense) as engine:
        with pytest.raises(InvalidRequestError, match=message):
            await engine.embed(EmbedRequest(["ab"], kinds, **options))
        await engine.embed(EmbedRequest(["ab"]))


async def test_a_text_that_may_not_be_cut_is_refused_and_named() -> None:
    model = FakeM3()
    async with engine_for(model) as engine:
        await engine.embed(EmbedRequest(["a" * 100], truncation=REFUSE))
        with pytest.raises(TextTooLongError) as caught:
            await engine.embed(EmbedRequest(["a", "b" * 130, "c" * 140], truncation=REFUSE))
    assert str(caught.value) == (
        "the text at index 1 has 130 tokens, and fake-m3 reads at most 100 of it: shorten it, or "
        "let the option truncate cut it"
    )
    assert [each["pointer"] for each in caught.value.problems] == ["/sentences/1", "/sentences/2"]
    assert model.batches == [[100]]


async def test_a_text_that_one_of_two_models_would_cut_is_refused() -> None:
    async with engine_for(FakeM3(), dense=FakeQwen()) as engine:
        with pytest.raises(TextTooLongError, match="has 104 tokens, and fake-qwen reads"):
            await engine.embed(EmbedRequest(["a" * 98], truncation=REFUSE, input_type="query"))


async def test_token_strings_stand_beside_weights_and_rows() -> None:
    async with engine_for(FakeM3(), dense=FakeQwen()) as engine:
        result = await engine.embed(EmbedRequest(["abab", "c"], ALL, return_tokens=True))
        assert [each.sparse for each in result.token_strings] == [["a", "b"], ["c"]]
        assert [each.colbert for each in result.token_strings] == [["b", "a", "b"], []]
        plain = await engine.embed(EmbedRequest(["abab"]))
    assert plain.token_strings is None


async def test_strings_of_a_kind_not_asked_for_are_none() -> None:
    async with engine_for(FakeSparseOnly()) as engine:
        (strings,) = (
            await engine.embed(
                EmbedRequest(["ab"], Outputs(dense=True, sparse=True), return_tokens=True)
            )
        ).token_strings
    assert (strings.sparse, strings.colbert) == (["a", "b"], None)


class FakeSparseOnly(FakeM3):
    def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
        return [replace(each, colbert=None) for each in super().results(sequences)]


_FIELDS = ("truncation", "input_type", "dimensions", "return_tokens")
OPTIONS = [
    dict(zip(_FIELDS, values, strict=True))
    for values in product(
        (TruncationOptions(), LEFT), (None, "query", "document"), (None, 2), (False, True)
    )
]


async def test_requests_with_different_options_share_a_batch_and_nothing_else() -> None:
    """Each answer is that of a lonely request, to the last bit."""
    texts = [f"text {i} " + "abcdefgh" * (i * 5) for i in range(6)]
    async with engine_for(FakeM3(), dense=FakeQwen(), max_batch_tokens=100_000) as engine:
        alone = [await engine.embed(EmbedRequest(texts, ALL, **options)) for options in OPTIONS]
    dense = FakeQwen()
    async with engine_for(FakeM3(), dense=dense, max_batch_tokens=100_000) as engine:
        held = await hold(engine, dense)
        together = [
            asyncio.create_task(engine.embed(EmbedRequest(texts, ALL, **each))) for each in OPTIONS
        ]
        await queued(engine, sum(result.tokens for result in alone))
        let_go(dense)
        results = await asyncio.gather(*together)
        await held
    assert list(map(len, dense.batches)) == [1, len(texts) * len(OPTIONS)]
    for one, other in zip(alone, results, strict=True):
        assert (one.truncations, one.tokens) == (other.truncations, other.tokens)
        assert one.token_strings == other.token_strings
        for left, right in zip(one.embeddings, other.embeddings, strict=True):
            assert left.dense.tobytes() == right.dense.tobytes()
            assert left.colbert.tobytes() == right.colbert.tobytes()
            assert left.sparse.values.tobytes() == right.sparse.values.tobytes()


class Truncating(FakeReranker):
    """Reads at most five characters of a passage."""

    def tokenize_pairs(self, query, passages, instruction, truncation=CUT_AT_END):
        pairs = super().tokenize_pairs(query, passages, instruction, truncation)
        return [replace(pair, passage_kept=min(5, pair.passage_tokens)) for pair in pairs]


async def test_a_passage_that_may_not_be_cut_is_refused_and_named() -> None:
    async with engine_for(FakeM3(), reranker=Truncating()) as engine:
        passages = ["abcde", "abcdef"]
        result = await engine.rerank(RerankRequest("q", passages, truncation=LEFT))
        (cut,) = result.truncations
        assert (cut.field, cut.index, cut.side) == ("passages", 1, "left")
        with pytest.raises(TextTooLongError, match="the text at index 1 has 6 tokens") as caught:
            await engine.rerank(RerankRequest("q", passages, truncation=REFUSE))
        assert caught.value.problems[0]["pointer"] == "/passages/1"


async def test_late_interaction_cuts_passages_from_the_side_and_the_query_from_the_end() -> None:
    model = FakeM3()
    async with engine_for(model, late_interaction=True) as engine:
        request = RerankRequest("q" * 120, ["a" * 50 + "b" * 100], truncation=LEFT)
        result = await engine.rerank(request)
        assert [(cut.field, cut.side) for cut in result.truncations] == [
            ("query", "right"),
            ("passages", "left"),
        ]
        with pytest.raises(TextTooLongError, match="the query has 120 tokens"):
            await engine.rerank(replace(request, truncation=REFUSE))
        only_b = await engine.rerank(replace(request, passages=["b" * 100]))
    assert result.scores == only_b.scores
    assert Outputs(dense=True, sparse=True, colbert=True) in model.outputs[0]
