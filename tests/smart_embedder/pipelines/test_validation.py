"""Validation: unknown kinds, options without effect, prompts and truncation."""

from dataclasses import replace

import numpy as np
import pytest

from smart_embedder.errors import InvalidRequestError, KindNotMadeError, TextTooLongError
from smart_embedder.pipelines.validation import (
    check_truncations,
    pair_truncations,
    text_truncations,
)
from smart_embedder.requests import (
    DENSE,
    EmbedRequest,
    Outputs,
    RerankRequest,
    TruncationOptions,
    check_rendering,
)
from smart_embedder.results import Truncation
from smart_embedder.settings import MAX_PROMPT_CHARACTERS
from smart_embedder.tokens import TokenCount, TokenizedPair, TokenizedText
from tests.smart_embedder.engines import engine_for
from tests.smart_embedder.fakes import ALL, FakeM3, FakeModel, FakeQwen, FakeReranker

LEFT = TruncationOptions(side="left")
REFUSE = TruncationOptions(truncate=False)
SPARSE, REST = Outputs(sparse=True), Outputs(sparse=True, colbert=True)


def test_truncations_are_reported_with_index_and_side_and_once_for_a_query() -> None:
    cuts = [(3, 3, True), (3, 9, True), (0, 0, True), (2, 7, False)]
    texts = [TokenizedText(np.zeros(kept, np.int64), had, exact) for kept, had, exact in cuts]
    found = text_truncations(FakeModel(), texts, "inputs", "left")
    assert found == [
        Truncation("inputs", 1, "fake", 3, 9, "left"),
        Truncation("inputs", 3, "fake", 2, 7, "left", exact=False),
    ]
    assert [truncation.truncated_tokens for truncation in found] == [6, 5]
    ids = np.zeros(1, np.int64)
    pairs = [
        TokenizedPair(ids, TokenCount(8, 5), TokenCount(4, 4)),
        TokenizedPair(ids, TokenCount(8, 2, exact=False), TokenCount(6, 3, exact=False)),
        TokenizedPair(ids, TokenCount(8, 8), TokenCount(2, 1)),
    ]
    assert pair_truncations(FakeReranker(), pairs, "left") == [
        Truncation("query", 0, "fake", 2, 8, exact=False),
        Truncation("passages", 1, "fake", 3, 6, "left", exact=False),
        Truncation("passages", 2, "fake", 1, 2, "left"),
    ]
    whole = TokenizedPair(ids, TokenCount(8, 8), TokenCount(4, 4))
    assert pair_truncations(FakeReranker(), [whole], "right") == []


def test_a_truncation_error_explains_the_first_text_and_names_at_most_ten() -> None:
    check_truncations([], REFUSE)
    cuts = [Truncation("sentences", number, "m", 8, 11) for number in range(4, 30)]
    check_truncations(cuts, TruncationOptions())
    with pytest.raises(TextTooLongError) as refused:
        check_truncations(cuts, REFUSE)
    assert str(refused.value) == (
        "the text at index 4 has 11 tokens, and m reads at most 8 of it: shorten it, or let the "
        "option truncate cut it"
    )
    pointers = [problem["pointer"] for problem in refused.value.problems]
    assert pointers == [f"/sentences/{number}" for number in range(4, 14)]
    with pytest.raises(TextTooLongError, match="the query has at least 11 tokens") as refused:
        check_truncations([Truncation("query", 0, "m", 8, 11, exact=False)], REFUSE)
    assert refused.value.problems[0]["pointer"] == "/query"


POOLED = {"colbert_pool_factor": 2}


@pytest.mark.parametrize(
    ("outputs", "options", "message"),
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
def test_rendering_options_without_effect_are_refused(outputs, options, message) -> None:
    request = EmbedRequest([], outputs, **options)
    if message is None:
        check_rendering(request)
    else:
        with pytest.raises(InvalidRequestError, match=message):
            check_rendering(request)


async def test_a_kind_that_no_model_computes_is_refused_and_the_models_are_named() -> None:
    sparse, dense = FakeModel(), FakeModel()
    sparse.name, sparse.kinds = "fake-sparse", SPARSE
    dense.name, dense.kinds = "fake-dense", Outputs(dense=True)
    async with engine_for(sparse, dense=dense) as engine:
        with pytest.raises(KindNotMadeError) as caught:
            await engine.embed(EmbedRequest(["ab"], ALL))
        with pytest.raises(KindNotMadeError, match="dense vectors are not made here"):
            await engine.embed(EmbedRequest(["ab"], model="BAAI/bge-m3"))
        with pytest.raises(InvalidRequestError, match="nothing is asked for"):
            await engine.embed(EmbedRequest(["ab"], Outputs()))
    assert str(caught.value) == (
        "ColBERT vectors are not made here: fake-dense and fake-sparse make dense vectors, sparse "
        "vectors"
    )


@pytest.mark.parametrize(
    ("prompts", "options", "prompt_tokens"),
    [
        # The type finds a prompt by several names; a model without any accepts the type too.
        ({"query": "p"}, {"input_type": "query"}, 1),
        ({"passage": "p"}, {"input_type": "document"}, 1),
        ({"corpus": "p"}, {"input_type": "document"}, 1),
        ({}, {"input_type": "query"}, 0),
        ({}, {"input_type": "document"}, 0),
        # A preferred prompt is used before that of the type.
        (FakeQwen.prompts, {"preferred_prompts": ("code",), "input_type": "query"}, 4),
        (FakeQwen.prompts, {"preferred_prompts": ("x", "code")}, 4),
        (FakeQwen.prompts, {"preferred_prompts": ("x",), "input_type": "query"}, 6),
        (FakeQwen.prompts, {"preferred_prompts": ("x",)}, 0),
        # The shortest and the longest prompt; the model reads at most 100 tokens.
        ({}, {"prompt": "x"}, 1),
        ({}, {"prompt": "x" * MAX_PROMPT_CHARACTERS}, 98),
    ],
)
async def test_a_prompt_is_given_or_found_by_input_type(prompts, options, prompt_tokens) -> None:
    embedder = FakeM3()
    embedder.prompts = prompts
    async with engine_for(embedder) as engine:
        # If one model computes all kinds, the prompt applies to all.
        await engine.embed(EmbedRequest(["ab"], REST, **options))
    assert embedder.batches == [[2 + prompt_tokens]]


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
async def test_an_option_without_effect_is_refused(dense, options, kinds, message) -> None:
    async with engine_for(FakeM3(), dense=dense) as engine:
        with pytest.raises(InvalidRequestError, match=message):
            await engine.embed(EmbedRequest(["ab"], kinds, **options))
        await engine.embed(EmbedRequest(["ab"]))


async def test_without_truncate_a_text_too_long_for_one_of_two_models_is_refused() -> None:
    embedder, dense = FakeM3(), FakeQwen()
    async with engine_for(embedder, dense=dense) as engine:
        with pytest.raises(TextTooLongError, match="has 104 tokens, and fake-qwen reads"):
            await engine.embed(EmbedRequest(["a" * 98], ALL, truncation=REFUSE, input_type="query"))
        assert not dense.batches
        await engine.embed(EmbedRequest(["a" * 94], truncation=REFUSE, input_type="query"))
    assert (dense.batches, embedder.batches) == ([[100]], [])


async def test_token_strings_belong_to_sparse_weights_and_colbert_rows() -> None:
    async with engine_for(FakeM3(), dense=FakeQwen()) as engine:
        result = await engine.embed(EmbedRequest(["abab", "c"], ALL, return_tokens=True))
        assert [strings.sparse for strings in result.token_strings] == [["a", "b"], ["c"]]
        assert [strings.colbert for strings in result.token_strings] == [["b", "a", "b"], []]
        assert (await engine.embed(EmbedRequest(["abab"]))).token_strings is None
    async with engine_for(FakeM3()) as engine:
        result = await engine.embed(EmbedRequest(["ab"], SPARSE, return_tokens=True))
    (strings,) = result.token_strings
    assert (strings.sparse, strings.colbert) == (["a", "b"], None)


async def test_without_truncate_a_passage_that_is_too_long_is_refused() -> None:
    class Truncating(FakeReranker):
        """A reranker that reads at most five characters of a passage."""

        def tokenize_pairs(self, *arguments):
            pairs = super().tokenize_pairs(*arguments)
            return [
                replace(pair, passage=replace(pair.passage, kept=min(5, pair.passage.total)))
                for pair in pairs
            ]

    async with engine_for(FakeM3(), reranker=Truncating()) as engine:
        request = RerankRequest("q", ["abcde", "abcdef"], truncation=LEFT)
        (truncation,) = (await engine.rerank(request)).truncations
        assert (truncation.pointer, truncation.side) == ("/passages/1", "left")
        with pytest.raises(TextTooLongError, match="the text at index 1 has 6 tokens"):
            await engine.rerank(replace(request, truncation=REFUSE))


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
    assert ALL in model.outputs[0]
