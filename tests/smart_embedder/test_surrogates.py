"""Lone surrogates are replaced by U+FFFD, in strings and in escapes of JSON."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.surrogates import parse_with_surrogates, without_surrogates

TEXTS = st.text(st.characters() | st.sampled_from("\ud83d\ude00\ud7ff\ue000\ufffda"))


def replace_slowly(text: str) -> str:
    """Replace surrogates one by one, after the codec has decoded pairs."""
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in joined)


@given(TEXTS)
def test_any_string_equals_the_slow_replacement(text: str) -> None:
    replaced = without_surrogates(text)
    assert replaced == replace_slowly(text)
    assert (replaced is text) == (replaced == text)


VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)


@given(VALUES)
def test_escapes_in_json_are_replaced_and_reported(value: Any) -> None:
    """The pointers are those of the changed strings."""
    sent, replaced = json.dumps({"key": value, "other": "\ud83d"}), list[str]()
    read = parse_with_surrogates(sent.encode(), replaced)
    json.dumps(read, ensure_ascii=False).encode()
    parsed = json.loads(sent)
    changed = [*pointers(parsed, "")]
    assert replaced == changed
    assert changed[-1] == "/other"


def pointers(value: Any, pointer: str) -> Iterator[str]:
    if isinstance(value, str):
        if replace_slowly(value) != value:
            yield pointer
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from pointers(item, f"{pointer}/{index}")
    elif isinstance(value, dict):
        for name, item in {replace_slowly(name): item for name, item in value.items()}.items():
            yield from pointers(item, f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}")


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": "\\ud83d"',
        b'{"a": "b"}',
        b'"\\uD83D \xff"',
        b'"\xed\xa0\x80 \\ud83d"',
        b"[" * 100_000 + b'"\\ud83d"' + b"]" * 100_000,
    ],
)
def test_other_invalid_json_stays_invalid(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of json, of the codec or of this module
        parse_with_surrogates(content, [])
