"""The site of the documentation: what mkdocs' own strict mode does not find."""

from pathlib import Path

import pytest

from scripts.docs_site import foreign_loads, on_page_markdown


@pytest.mark.parametrize(
    ("head", "foreign"),
    [
        ('<script src="https://cdn.example.com/a.js">', ["https://cdn.example.com/a.js"]),
        ('<link rel="stylesheet" href="//fonts.example.com">', ["//fonts.example.com"]),
        ('<script src="assets/a.js"></script><img src="a.svg">', []),
        ('<a href="https://example.com">a link is only followed</a>', []),
        ('<link rel="canonical" href="https://example.com/a.html">', []),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(
    tmp_path: Path, head: str, foreign: list[str]
) -> None:
    (tmp_path / "a.html").write_text(head)
    assert foreign_loads(tmp_path) == [f"a.html: {address}" for address in foreign]


def test_what_a_style_sheet_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("a{b:url(c.woff)} d{e:url('https://f.example/g.woff')}")
    assert foreign_loads(tmp_path) == ["a.css: https://f.example/g.woff"]


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[the rules](../SECURITY.md#a)", "[the rules](SECURITY.md#a)"),
        ("[.env.example](../.env.example)", "`.env.example`"),
        ("[alert rules](../deploy)", "alert rules (`deploy`)"),
        ("[the API](api.md#errors)", "[the API](api.md#errors)"),
        ("[nothing](../nothing.md)", "[nothing](../nothing.md)"),
        ("[the web](https://example.com)", "[the web](https://example.com)"),
        ('<!-- skip: next "needs Docker" -->\ntext', "text"),
    ],
)
def test_links_lead_to_pages_and_files_that_are_none_are_named(link: str, expected: str) -> None:
    """A link to nothing stays as it is, so that mkdocs reports it."""
    assert on_page_markdown(link) == expected
