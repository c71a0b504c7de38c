"""The reranker's prompt joined from token ids is the prompt tokenised as one text."""

from bisect import bisect_right
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Encoding, Tokenizer

from smart_embedder.engine.records import TokenizedPair, TruncationOptions
from smart_embedder.errors import StartupError
from smart_embedder.models.tasks.qwen3 import QwenTemplate
from smart_embedder.models.text.tokenizer import TextTokenizer
from tests.models.text.test_slices import GAPS, WORDS, qwen_words

PARTS = st.lists(st.sampled_from([*WORDS, *GAPS, "?", ":", "<", ">:", "1", "search"]), max_size=8)
TEXTS = PARTS.map("".join) | st.text(max_size=20)


@pytest.fixture(scope="module", params=["GPT-2's words", "Qwen's words"])
def tokenizer(request, tiny_qwen: Path) -> Tokenizer:
    if request.param == "Qwen's words":
        return qwen_words(tiny_qwen)
    return Tokenizer.from_file(str(tiny_qwen / "tokenizer.json"))


def reference(tokenizer: Tokenizer, room: int, texts: tuple[str, str, str]) -> dict[str, object]:
    """Ids of the content and counts, by the characters that each token of the whole text covers."""
    instruction, query, passage = texts
    head = f"<Instruct>: {instruction}\n<Query>: "
    middle = f"{query}\n<Document>: "
    whole: Encoding = tokenizer.encode(head + middle + passage, add_special_tokens=False)
    ends = [end for _, end in whole.offsets]
    first_query = bisect_right(ends, len(head))
    first_passage = bisect_right(ends, len(head + middle))
    before = sum(start < len(head + query) for start, _ in whole.offsets)
    after_query = min(first_passage, before)
    kept = min(len(whole.ids), room)
    return {
        "ids": whole.ids[:kept],
        "query_tokens": after_query - first_query,
        "query_kept": max(0, min(kept, after_query) - first_query),
        "passage_tokens": len(whole.ids) - first_passage,
        "passage_kept": max(0, kept - first_passage),
    }


def found(template: QwenTemplate, pair: TokenizedPair) -> dict[str, object]:
    content = pair.ids[len(template.prefix) : len(pair.ids) - len(template.suffix)]
    return {
        "ids": content.tolist(),
        "query_tokens": pair.query_tokens,
        "query_kept": pair.query_kept,
        "passage_tokens": pair.passage_tokens,
        "passage_kept": pair.passage_kept,
    }


@given(st.sampled_from(["Find it", "x\n", " "]), TEXTS.filter(str.strip), TEXTS, st.integers(1, 90))
@settings(max_examples=150)
def test_ids_and_counts_are_those_of_the_whole_prompt(
    tokenizer: Tokenizer, instruction: str, query: str, passage: str, room: int
) -> None:
    frame = TextTokenizer(tokenizer, 4096)
    empty = QwenTemplate(frame)
    limit = room + len(empty.prefix) + len(empty.suffix)
    template = QwenTemplate(TextTokenizer(tokenizer, limit))
    pairs = template.pairs(query, [passage, "", f" {passage}"], instruction)
    for text, pair in zip([passage, "", f" {passage}"], pairs, strict=True):
        expected = reference(tokenizer, room, (instruction, query, text))
        assert found(template, pair) == expected


def test_a_lines_end_that_is_one_with_the_querys_last_token_is_of_the_query(
    tokenizer: Tokenizer,
) -> None:
    joining = Tokenizer.from_str(tokenizer.to_str())
    joining.add_tokens(["?\n"])
    template = QwenTemplate(TextTokenizer(joining, 4096))
    room = 4096 - len(template.prefix) - len(template.suffix)
    (pair,) = template.pairs("search?", ["hybrid"], "Find")
    assert found(template, pair) == reference(joining, room, ("Find", "search?", "hybrid"))
    (plain,) = template.pairs("search!", ["hybrid"], "Find")
    assert len(plain.ids) == len(pair.ids) + 1


def test_a_query_of_many_slices_is_counted_as_a_whole(tokenizer: Tokenizer) -> None:
    query, passage = "search vector. " * 400, "hybrid"
    template = QwenTemplate(TextTokenizer(tokenizer, 4096, slice_characters=500))
    room = 4096 - len(template.prefix) - len(template.suffix)
    (pair,) = template.pairs(query, [passage], "Find")
    assert found(template, pair) == reference(tokenizer, room, ("Find", query, passage))


def test_pairs_of_one_query_share_it(tokenizer: Tokenizer) -> None:
    pairs = QwenTemplate(TextTokenizer(tokenizer, 4096)).pairs("search", ["a", "b"], "Find")
    first, second = (pair.sequence._first for pair in pairs)
    assert first is second


@pytest.mark.parametrize("passage", ["", "hybrid", " hybrid search of vectors", "x " * 30])
@pytest.mark.parametrize("most", [1, 2, 5, 200, None])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_passage_is_cut_from_either_side_to_its_own_limit(
    tokenizer: Tokenizer, passage: str, most: int | None, side
) -> None:
    texts = TextTokenizer(tokenizer, 4096)
    template = QwenTemplate(texts)
    cut = TruncationOptions(side=side, max_tokens=most)
    (pair,) = template.pairs("search", [passage], "Find", cut)
    (head,) = template.pairs("search", [""], "Find", TruncationOptions(max_tokens=0))
    whole = texts.encode_plain([f" {passage}"], 4096)[0].ids.tolist()
    count = len(whole) if most is None else min(most, len(whole))
    kept = whole[:count] if side == "right" else whole[len(whole) - count :]
    before = head.ids[: len(head.ids) - len(template.suffix)].tolist()
    assert pair.ids.tolist() == [*before, *kept, *template.suffix]
    assert pair.query_kept == pair.query_tokens == head.query_tokens
    if count == len(whole):
        assert pair.passage_kept == pair.passage_tokens
    elif side == "left":
        assert pair.passage_kept == count
    else:
        assert pair.passage_tokens - pair.passage_kept == len(whole) - count


def test_a_limit_leaves_room_for_a_token_beside_the_template(tokenizer: Tokenizer) -> None:
    whole = QwenTemplate(TextTokenizer(tokenizer, 4096))
    frame = len(whole.prefix) + len(whole.suffix)
    (pair,) = QwenTemplate(TextTokenizer(tokenizer, frame + 1)).pairs("search", ["a"], "Find")
    assert len(pair.ids) == frame + 1
    with pytest.raises(StartupError, match=f"a length limit of {frame} tokens leaves no room besi"):
        QwenTemplate(TextTokenizer(tokenizer, frame))
