"""The special tokens around one text, and around and between two."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from smart_embedder.errors import StartupError
from smart_embedder.models.text.tokenizer import closed_with, pair_template_of, template_of

VOCABULARY = {"[CLS]": 0, "[SEP]": 1, "[END]": 2, "a": 3, "b": 4, "[UNK]": 5}


def tokenizer(single: str, pair: str) -> Tokenizer:
    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(name, VOCABULARY[name]) for name in ("[CLS]", "[SEP]", "[END]")]
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )
    return made


@pytest.mark.parametrize(
    ("single", "prefix", "suffix"),
    [
        ("$A", [], []),
        ("[CLS] $A [SEP]", [0], [1]),
        ("[CLS] [SEP] $A", [0, 1], []),
        ("$A [SEP] [END]", [], [1, 2]),
    ],
)
def test_the_tokens_around_a_text_are_found(single, prefix, suffix) -> None:
    found = template_of(tokenizer(single, "$A $B"))
    assert (found.prefix.tolist(), found.suffix.tolist()) == (prefix, suffix)
    assert len(found) == len(prefix) + len(suffix)


@pytest.mark.parametrize(
    ("pair", "prefix", "middle", "suffix"),
    [
        ("$A $B:1", [], [], []),
        ("[CLS] $A [SEP] $B:1 [SEP]:1", [0], [1], [1]),
        ("[CLS] [CLS] $A [SEP] [SEP] [END] $B:1", [0, 0], [1, 1, 2], []),
        ("$A [SEP] $B:1 [SEP]:1 [END]:1", [], [1], [1, 2]),
    ],
)
def test_the_tokens_around_and_between_two_texts_are_found(pair, prefix, middle, suffix) -> None:
    found = pair_template_of(tokenizer("[CLS] $A [END]", pair))
    parts = (found.prefix, found.middle, found.suffix)
    assert [part.tolist() for part in parts] == [prefix, middle, suffix]
    assert len(found) == sum(map(len, parts))


@pytest.mark.parametrize(
    ("single", "closing", "suffix"),
    [
        ("[CLS] $A", None, []),
        ("[CLS] $A", "[END]", [2]),
        ("[CLS] $A [SEP]", "[END]", [1, 2]),
        ("[CLS] $A [END]", "[END]", [2]),
        ("$A [END] [SEP]", "[END]", [2, 1, 2]),
    ],
)
def test_a_closing_token_is_added_where_it_is_not_there(single, closing, suffix) -> None:
    made = tokenizer(single, "$A $B")
    before = template_of(made)
    closed = closed_with(before, closing, made)
    assert closed.suffix.tolist() == suffix
    assert closed.prefix.tolist() == before.prefix.tolist()


def test_what_is_in_no_vocabulary_or_changes_the_text_stops_the_start() -> None:
    made = tokenizer("$A", "$B $A")
    with pytest.raises(StartupError, match=r"the vocabulary has no token \[NONE\]"):
        closed_with(template_of(made), "[NONE]", made)
    with pytest.raises(StartupError, match="changes the text itself where it adds special tokens"):
        pair_template_of(made)
