"""Hooks of mkdocs for pages and files outside docs/, and a check of the built site.

    python scripts/docs_site.py SITE

fails if a page of the built site would load something from another server.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")
# Attributes whose address a browser loads with the page.
_LOADS = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}
_NO_LOAD = {"canonical", "prev", "next"}
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_SKIP = re.compile(r"^<!-- (skip|/?settings): .*-->\n?", re.MULTILINE)


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages in the root folder, where GitHub expects them."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - only in mkdocs' environment

    for name in OUTSIDE:
        content = (ROOT / name).read_text("utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to pages of the site; replace links to other files by their names."""
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
    """Collects the addresses that a page loads from other servers."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Check the attributes with which a tag loads something."""
        if tag == "link" and dict(attrs).get("rel") in _NO_LOAD:
            return
        self.foreign += [
            value
            for name, value in attrs
            if (tag, name) in _LOADS and value and re.match(r"(https?:)?//", value)
        ]


def foreign_loads(site: Path) -> list[str]:
    """List the addresses that the pages and style sheets of a site load from other servers."""
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
        sys.exit("\n".join(["The site would load from other servers:", *foreign]))
