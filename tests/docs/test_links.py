"""Every link inside the repository leads somewhere."""

import re
from pathlib import Path

import pytest

from tests.docs.examples import PAGES
from tests.support.server import REPOSITORY

FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILES = [*PAGES, REPOSITORY / "CHANGELOG.md", REPOSITORY / "CONTRIBUTING.md"]


def remove_code(file: Path) -> str:
    return FENCED.sub("", file.read_text(encoding="utf-8"))


def heading_anchors(file: Path) -> set[str]:
    """Return the anchors that GitHub makes from the headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", remove_code(file))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_links_lead_to_existing_files_and_headings(file: Path) -> None:
    for link in LINK.findall(remove_code(file)):
        if re.match(r"[a-z]+://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), link
        assert not anchor or anchor in heading_anchors(target), link


def test_every_page_is_linked_from_the_readme() -> None:
    links = set(LINK.findall(remove_code(REPOSITORY / "README.md")))
    pages = {file.relative_to(REPOSITORY).as_posix() for file in PAGES} - {"README.md"}
    assert pages <= links
