"""What mkdocs needs besides its settings: pages and files from outside docs/, and a check.

    python scripts/docs_site.py SITE

fails where a page of the built site would load something from elsewhere.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")
# A browser fetches what these name as soon as it shows the page; an <a> only when it is followed.
_LOADS = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}
_NO_LOAD = {"canonical", "prev", "next"}
_LINK = re.compile(r"\[([^\]\n]+)\]\(([^)\s]+)\)")
_SKIP = re.compile(r"^<!-- (skip|/?settings): .*-->\n?", re.MULTILINE)


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages that lie beside docs/, where GitHub and pip look for them."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - only mkdocs' own environment has it

    for name in OUTSIDE:
        content = (ROOT / name).read_text("utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links lead to pages of the site, and name the files of the repository that are none."""
    return _LINK.sub(_relink, _SKIP.sub("", markdown))


def _relink(found: re.Match[str]) -> str:
    text, target = found.groups()
    path, hash_sign, anchor = target.removeprefix("../").partition("#")
    if path in OUTSIDE:
        return f"[{text}]({path}{hash_sign}{anchor})"
    if not target.startswith("../") or not (ROOT / path).exists():
        return found[0]
    return f"`{path}`" if path in text else f"{text} (`{path}`)"


class _Loads(HTMLParser):
    """Collects what a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at the attributes by which a tag loads something."""
        if tag == "link" and dict(attrs).get("rel") in _NO_LOAD:
            return
        self.foreign += [
            value
            for name, value in attrs
            if (tag, name) in _LOADS and value and re.match(r"(https?:)?//", value)
        ]


def foreign_loads(site: Path) -> list[str]:
    """Everything that the pages and style sheets of a built site load from elsewhere."""
    found: list[str] = []
    for page in sorted(site.rglob("*.html")):
        parser = _Loads()
        parser.feed(page.read_text("utf-8"))
        found += [f"{page.name}: {address}" for address in parser.foreign]
    for sheet in sorted(site.rglob("*.css")):
        addresses = re.findall(r"""url\(["']?((?:https?:)?//[^)"']+)""", sheet.read_text("utf-8"))
        found += [f"{sheet.name}: {address}" for address in addresses]
    return found


if __name__ == "__main__":
    site = Path(sys.argv[1])
    if not any(site.glob("*.html")):
        sys.exit(f"{site} has no pages")
    if foreign := foreign_loads(site):
        sys.exit("\n".join(["The site would load from elsewhere:", *foreign]))
