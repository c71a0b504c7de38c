"""Convert HTML to sections of Markdown: the content of a page, with the anchors of its headings.

Content extractors (trafilatura, resiliparse, readability) drop the ids of headings, which are the
anchors of links, and parts of code and tables. This module finds the content by the landmarks of
HTML and ARIA.
"""

import codecs
import io
import re
from dataclasses import dataclass

from lxml import etree

from smart_embedder_client.ingest.errors import UnreadableError

_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_BLOCKS = {
    *("address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "dialog"),
    *_HEADINGS,
    *("div", "dl", "dt", "fieldset", "figcaption", "figure", "form", "header", "hr", "main"),
    *("ol", "p", "pre", "section", "summary", "table", "ul"),
}
_CELLS = {"td", "th"}
_GAPS = (
    dict.fromkeys(_BLOCKS, "\n\n")
    | dict.fromkeys(_CELLS, " ")
    | {"br": "\n", "li": "\n", "tr": "\n"}
)
_ITEM = "- "
# A table with one of these in its cells is used for layout.
_LAYOUT = " | ".join(f".//{tag}" for tag in ("table", "pre", "div[2]", *_HEADINGS))
_DROPPED = {
    *("button", "footer", "head", "iframe", "nav", "noscript", "object", "script", "select"),
    *("style", "svg", "template", "textarea"),
}
_DROPPED_ROLES = {"banner", "button", "contentinfo", "navigation", "search"}
# The text of the link that documentation generators put after a heading.
_PERMALINKS = {"", "#", "\N{PILCROW SIGN}", "\N{SECTION SIGN}", "\N{LINK SYMBOL}", "\N{ANCHOR}"}
_PERMALINKS.add("\uf0c1")  # Font Awesome's link in the theme of Read the Docs.
_NAVIGATION = re.compile(
    r"nav.*|.*nav(igation)?|breadcrumbs?|footer|menu|side-?bar|toc", re.IGNORECASE
)
# HTML requires the declaration of the encoding within these bytes.
_DECLARED_WITHIN = 1024
_DECLARED = re.compile(
    rb"""<meta[^>]{0,200}charset\s{0,9}=\s{0,9}["']?\s{0,9}([\w.:-]{1,40})""", re.IGNORECASE
)
_UTF8 = "utf-8-sig"


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the text up to the next one, as Markdown.

    Attributes:
        headings: The headings above it, the outermost first, and its own.
        text: The Markdown. A heading without text is part of its first subsection.
        anchor: The target of links to its heading.
    """

    headings: tuple[str, ...]
    text: str
    anchor: str | None


def read_html(content: bytes) -> tuple[str, list[Section]]:
    """Return the title and the sections of a page.

    Raises:
        UnreadableError: The parser stopped before the end.
        UnicodeDecodeError: The page is neither UTF-8 nor in the encoding that it declares.
    """
    text = _decode(content)
    parser = etree.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True
    )
    try:
        root = etree.fromstring(text.encode(), parser)
    except etree.LxmlError as error:
        raise UnreadableError(f"is no HTML: {error}") from error
    # The parser stops at a fatal error, without raising it.
    fatal = [line.message for line in parser.error_log if line.level == etree.ErrorLevels.FATAL]
    if fatal:
        raise UnreadableError(f"is not read to its end: {fatal[0]}")
    if root is None:
        return "", []
    title = " ".join((root.findtext(".//title") or "").split())
    return title, _Converter(root).sections()


def _decode(content: bytes) -> str:
    """Decode a page strictly: lxml would replace wrong bytes silently."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16")
    declared = _DECLARED.search(content[:_DECLARED_WITHIN])
    name = declared[1].decode().lower() if declared else _UTF8
    try:
        # A declaration that can be read is not in UTF-16, even if it says so.
        return content.decode(_UTF8 if name.startswith("utf") else name)
    except LookupError:
        return content.decode(_UTF8)


def _text_of(element: etree._Element) -> str:
    return " ".join("".join(element.itertext()).split())


def _has_name_of_navigation(element: etree._Element) -> bool:
    """Whether an element has a class or id such as `menu`."""
    names = (*element.get("class", "").split(), element.get("id", ""))
    return any(map(_NAVIGATION.fullmatch, names))


class _Writer:
    """Writes Markdown with at most one empty line in a row."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        self._gap = ""
        self._is_marked = False

    def require_gap(self, gap: str) -> None:
        """Write at least this white space before the next text."""
        # The first paragraph of a list item follows the item's mark.
        is_larger = not self._gap or gap.count("\n") > self._gap.count("\n")
        if self.text.tell() and not self._is_marked and is_larger:
            self._gap = gap

    def begin_item(self) -> None:
        """Write the mark of a list item before the next text."""
        if not self._is_marked:
            self._gap += _ITEM
            self._is_marked = True

    def end_item(self) -> None:
        """Drop the mark of a list item without text."""
        if self._is_marked:
            self._gap = self._gap.removesuffix(_ITEM)
            self._is_marked = False

    def add(self, text: str) -> None:
        """Write running text, with white space collapsed."""
        if text[:1].isspace():
            self.require_gap(" ")
        if words := " ".join(text.split()):
            self.write(words)
            self._gap = " " if text[-1].isspace() else ""

    def write(self, text: str) -> None:
        """Write text unchanged."""
        self.text.write(self._gap + text)
        self._gap, self._is_marked = "", False


class _Converter:
    """Converts the content of a page in one pass, without recursion."""

    def __init__(self, root: etree._Element) -> None:
        # Several articles are a list, whose heading is outside of them.
        articles = root.xpath("//article")
        mains = root.xpath("//main | //*[@role='main']") or articles[: len(articles) == 1]
        self._has_main = bool(mains) and bool(_text_of(mains[0]))
        self._root = mains[0] if self._has_main else root
        self._length = len(_text_of(self._root))
        self._sections: list[Section] = []
        self._path: list[tuple[int, str]] = []
        self._writer = _Writer()
        # The anchor of the section, and whether it has text after its headings.
        self._anchor: str | None = None
        self._has_text = False
        # The last id since the last text: the anchor of the next heading.
        self._id: str | None = None
        # The heading, code or cell whose text is collected, and the earlier cells of its row.
        self._open: etree._Element | None = None
        self._collected: list[str] = []
        self._row: list[tuple[str, str]] = []
        self._has_header = False
        self._layout_tables: list[etree._Element] = []

    def sections(self) -> list[Section]:
        """Return all sections that have text."""
        walk = etree.iterwalk(self._root, events=("start", "end"))
        for event, element in walk:
            if event == "start":
                if self._is_dropped(element):
                    walk.skip_subtree()
                else:
                    self._start(element)
                    self._add(element.text)
            else:
                self._end(element)
                if element is not self._root:
                    self._add(element.tail)
        self._end_section()
        return self._sections

    def _is_dropped(self, element: etree._Element) -> bool:
        tag, role = element.tag, element.get("role")
        if element is self._root:
            return False
        link = element.get("href", "") if tag == "a" else ""
        if link.startswith("#") and _text_of(element) in _PERMALINKS:
            if self._open is not None:
                self._id = link[1:] or self._id
            return True
        if tag in _DROPPED or role in _DROPPED_ROLES:
            return True
        if element.get("hidden") is not None or element.get("aria-hidden") == "true":
            return True
        if tag == "aside" or role == "complementary":
            # An aside in the content is a note.
            return not self._has_main
        is_candidate = tag == "form" or (not self._has_main and _has_name_of_navigation(element))
        # Half the text or more is content: a form around the page, or an index of links.
        return is_candidate and 2 * len(_text_of(element)) < self._length

    def _start(self, element: etree._Element) -> None:
        tag = element.tag
        self._id = element.get("id") or (tag == "a" and element.get("name")) or self._id
        if self._open is not None:
            self._collected.append("\n" if tag == "br" else " " if tag in _GAPS else "")
            return
        self._writer.require_gap(_GAPS.get(tag, ""))
        if tag == "li":
            self._writer.begin_item()
        elif tag == "table":
            self._has_header = element.find(".//th") is not None
            if element.xpath(_LAYOUT):
                self._layout_tables.append(element)
        elif tag in _HEADINGS or tag == "pre" or self._is_cell(element):
            self._open, self._collected = element, []

    def _is_cell(self, element: etree._Element) -> bool:
        parent = element.getparent()
        is_in_row = element.tag in _CELLS and parent is not None and parent.tag == "tr"
        return is_in_row and not self._layout_tables

    def _add(self, text: str | None) -> None:
        if not text:
            return
        if self._open is not None:
            self._collected.append(text)
            return
        if not text.isspace():
            self._note_text()
        self._writer.add(text)

    def _note_text(self) -> None:
        self._has_text, self._id = True, None

    def _end(self, element: etree._Element) -> None:
        tag = element.tag
        if self._open is None:
            if tag == "li":
                self._writer.end_item()
            elif tag == "tr" and self._row:
                self._add_row(element)
            elif self._layout_tables and self._layout_tables[-1] is element:
                self._layout_tables.pop()
            self._writer.require_gap(_GAPS.get(tag, ""))
        elif self._open is element:
            self._open = None
            code = "".join(self._collected)
            text = " ".join(code.split())
            if tag == "pre":
                self._add_code(code)
            elif tag in _CELLS:
                self._row.append((tag, text))
            else:
                self._id = element.get("id") or self._id
                self._add_heading(_HEADINGS[tag], text)

    def _add_code(self, code: str) -> None:
        if code.strip():
            self._note_text()
            # The fence is longer than any in the code.
            fence = max(("```", *(f"{ticks}`" for ticks in re.findall("`{3,}", code))), key=len)
            lines = code.rstrip().removeprefix("\n")
            self._writer.write(f"{fence}\n{lines}\n{fence}")
            self._writer.require_gap("\n\n")

    def _add_row(self, element: etree._Element) -> None:
        cells = [text for _, text in self._row]
        if any(cells):
            self._note_text()
            self._writer.write(f"| {' | '.join(cells)} |" if self._has_header else " ".join(cells))
            if element.getprevious() is None and all(tag == "th" for tag, _ in self._row):
                self._writer.write(f"\n|{' --- |' * len(cells)}")
        self._row = []

    def _add_heading(self, level: int, title: str) -> None:
        if not title:
            return
        # A heading without text is part of its first subsection.
        if self._has_text or not (self._path and self._path[-1][0] < level):
            self._end_section()
        while self._path and self._path[-1][0] >= level:
            self._path.pop()
        self._path.append((level, title))
        self._writer.write(f"{'#' * level} {title}")
        self._writer.require_gap("\n\n")
        self._anchor = self._id

    def _end_section(self) -> None:
        if text := self._writer.text.getvalue():
            headings = tuple(title for _, title in self._path)
            self._sections.append(Section(headings, text, self._anchor))
        self._writer, self._anchor, self._has_text = _Writer(), None, False
