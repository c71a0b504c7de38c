"""The code blocks of the documentation run, and print what the pages show."""

import shutil
from pathlib import Path

import pytest
from sybil import Example

from tests.docs.examples import DOCUMENTATION, PAGES, check_json, check_lines
from tests.support.server import RunningServer

EXAMPLES = [example for page in PAGES for example in DOCUMENTATION.parse(page).examples()]


def location_of(example: Example) -> str:
    return f"{Path(example.path).name}:{example.line}"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("example", EXAMPLES, ids=location_of)
def test_an_example_does_what_the_page_says(
    example: Example, demo: RunningServer, checkout: Path
) -> None:
    example.namespace.update(url=demo.url, checkout=checkout)
    example.evaluate()


def test_numbers_may_differ_and_words_may_not() -> None:
    check_lines("took 3 ms\n...\nend", "log\ntook 4.5 ms\nx\ny\nend\n")
    for printed in ("took 3 s\nend", "took 3 ms\n", "end\ntook 3 ms"):
        with pytest.raises(AssertionError):
            check_lines("took 3 ms\n...\nend", printed)
    with pytest.raises(AssertionError, match="something stands before 'b'"):
        check_lines("a\nb", "a\nx\nb")


def test_json_is_compared_by_its_keys_and_types() -> None:
    printed = {"a": [{"b": 1, "c": None}], "d": {"12": 0.5}}
    check_json({"a": [{"b": 2}], "d": {"3": 1}}, printed)
    for shown in ({"a": [{"x": 2}]}, {"a": [{"b": "2"}]}):
        with pytest.raises(AssertionError):
            check_json(shown, printed)
