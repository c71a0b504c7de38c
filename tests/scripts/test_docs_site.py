"""The site of the documentation: links, and files from other servers."""

from pathlib import Path

import pytest

from scripts.docs_site import foreign_loads, on_page_markdown


@pytest.mark.parametrize(
    ("name", "content", "foreign"),
    [
        ("a.html", '<script src="https://cdn.example.com/a.js">', "https://cdn.example.com/a.js"),
        ("a.html", '<link rel="stylesheet" href="//fonts.example.com">', "//fonts.example.com"),
        ("a.html", '<script src="assets/a.js"></script><img src="a.svg">', None),
        ("a.html", '<a href="https://example.com">a link is only followed</a>', None),
        ("a.html", '<link rel="canonical" href="https://example.com/a.html">', None),
        ("a.css", "a{b:url(c.woff)} d{e:url('https://f.example/g')}", "https://f.example/g"),
    ],
)
def test_files_that_a_page_loads_from_other_servers_are_found(
    tmp_path: Path, name: str, content: str, foreign: str | None
) -> None:
    (tmp_path / name).write_text(content)
    assert foreign_loads(tmp_path) == ([] if foreign is None else [f"{name}: {foreign}"])


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[the rules](../SECURITY.md#a)", "[the rules](SECURITY.md#a)"),
        ("[the\nrules](../SECURITY.md#a)", "[the\nrules](SECURITY.md#a)"),
        ("[.env.example](../.env.example)", "`.env.example`"),
        ("[alert rules](../deploy)", "alert rules (`deploy`)"),
        ("[the API](api.md#errors)", "[the API](api.md#errors)"),
        ("[nothing](../nothing.md)", "[nothing](../nothing.md)"),
        ("[the web](https://example.com)", "[the web](https://example.com)"),
        ('<!-- skip: next "needs Docker" -->\ntext', "text"),
    ],
)
def test_links_lead_to_pages_and_other_files_are_named(link: str, expected: str) -> None:
    """A broken link stays as it is, so that mkdocs reports it."""
    assert on_page_markdown(link) == expected
