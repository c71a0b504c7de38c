"""The special tokens around one text, and around and between two."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from smart_embedder.errors import StartupError
from smart_embedder.models.text.tokenizer import TextTokenizer, template_of

VOCABULARY = {"[CLS]": 0, "[SEP]": 1, "[END]": 2, "a": 3, "b": 4, "[UNK]": 5}


def tokenizer(single: str, pair: str) -> Tokenizer:
    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(name, VOCABULARY[name]) for name in ("[CLS]", "[SEP]", "[END]")]
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )
    return made


def parts(found) -> list[list[int]]:
    return [part.tolist() for part in found]


@pytest.mark.parametrize(
    ("single", "expected"),
    [
        ("$A", [[], []]),
        ("[CLS] $A [SEP]", [[0], [1]]),
        ("[CLS] [SEP] $A", [[0, 1], []]),
        ("$A [SEP] [END]", [[], [1, 2]]),
    ],
)
def test_the_tokens_around_a_text_are_found(single, expected) -> None:
    assert parts(template_of(tokenizer(single, "$A $B"), "a")) == expected


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("$A $B:1", [[], [], []]),
        ("[CLS] $A [SEP] $B:1 [SEP]:1", [[0], [1], [1]]),
        ("[CLS] [CLS] $A [SEP] [SEP] [END] $B:1", [[0, 0], [1, 1, 2], []]),
        ("$A [SEP] $B:1 [SEP]:1 [END]:1", [[], [1], [1, 2]]),
    ],
)
def test_the_tokens_around_and_between_two_texts_are_found(pair, expected) -> None:
    found = TextTokenizer(tokenizer("[CLS] $A [END]", pair), 9).pair_template()
    assert parts(found) == expected


@pytest.mark.parametrize(
    ("single", "closing", "expected"),
    [
        ("[CLS] $A", None, [0, 3]),
        ("[CLS] $A", "[END]", [0, 3, 2]),
        ("[CLS] $A [SEP]", "[END]", [0, 3, 1, 2]),
        ("[CLS] $A [END]", "[END]", [0, 3, 2]),
        ("$A [END] [SEP]", "[END]", [3, 2, 1, 2]),
    ],
)
def test_a_closing_token_is_added_where_it_is_not_there(single, closing, expected) -> None:
    made = TextTokenizer(tokenizer(single, "$A $B"), 9, closing=closing)
    assert made.encode(["a"])[0].ids.tolist() == expected


def test_what_is_in_no_vocabulary_or_changes_the_text_stops_the_start() -> None:
    made = tokenizer("$A", "$B $A")
    with pytest.raises(StartupError, match=r"the vocabulary has no token \[NONE\]"):
        TextTokenizer(made, 9, closing="[NONE]")
    with pytest.raises(StartupError, match="changes the text itself where it adds special tokens"):
        template_of(made, "a", "b")
