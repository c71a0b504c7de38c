"""The text of an HTML file, with its headings, paragraphs and lists as Markdown has them."""

import codecs
import re
from itertools import groupby

from lxml import etree

from smart_embedder_client.ingest.documents import SourceError

_UNSEEN = {"head", "iframe", "noscript", "object", "script", "style", "svg", "template"}
_HEADINGS = {f"h{level}": f"{'#' * level} " for level in range(1, 7)}
_BEGINNINGS = _HEADINGS | {"li": "- "}
_BLOCKS = {
    *("address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "dialog"),
    *("div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "header", "hr"),
    *("main", "nav", "ol", "p", "pre", "section", "summary", "table", "title", "ul"),
    *_HEADINGS,
}
_LINES = {"br", "li", "option", "tr"}
_CELLS = {"td", "th"}
# Where HTML says that a declaration of its encoding must stand.
_DECLARED_WITHIN = 1024
_DECLARED = re.compile(
    rb"""<meta[^>]{0,200}charset\s{0,9}=\s{0,9}["']?\s{0,9}([\w.:-]{1,40})""", re.IGNORECASE
)
# Those of web pages, by their names in Python, which has other codecs, too.
_ENCODINGS = ("big5", "cp", "euc", "gb", "iso8859", "iso2022", "koi8", "mac", "shift_jis", "tis")
_UTF8 = "utf-8-sig"


def read_html(content: bytes) -> tuple[str, str]:
    """The title and the text; scripts, styles and comments are left out.

    Raises:
        SourceError: It has no elements.
        UnicodeDecodeError: It is neither UTF-8 nor in the encoding that it declares.
    """
    # Its own encoding, so that a wrong one is an error and not other letters.
    text = content.decode(_encoding_of(content))
    parser = etree.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True
    )
    try:
        root = etree.fromstring(text.encode(), parser)
    except etree.LxmlError as error:
        raise SourceError(f"it is no HTML: {error}") from error
    # Beyond it nothing was read.
    fatal = [each.message for each in parser.error_log if each.level == etree.ErrorLevels.FATAL]
    if fatal:
        raise SourceError(f"its end is not read: {fatal[0]}")
    if root is None:
        return "", ""
    title = " ".join((root.findtext(".//title") or "").split())
    return title, _tidied("".join(_pieces(root)))


def _encoding_of(content: bytes) -> str:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    found = _DECLARED.search(content[:_DECLARED_WITHIN])
    try:
        name = codecs.lookup(found[1].decode()).name if found else _UTF8
    except LookupError:
        return _UTF8
    return name if name.startswith(_ENCODINGS) else _UTF8


def _pieces(root: etree._Element) -> list[str]:
    """The text in order, with line ends around blocks; without recursion, however deep it is."""
    pieces: list[str] = []
    preformatted = 0

    def add(text: str | None) -> None:
        if text:
            pieces.append(text if preformatted else re.sub(r"\s+", " ", text))

    walk = etree.iterwalk(root, events=("start", "end"))
    for event, element in walk:
        tag = element.tag
        if tag in _BLOCKS or (tag in _LINES and event == "start"):
            pieces.append("\n\n" if tag in _BLOCKS else "\n")
        elif tag in _CELLS:
            pieces.append(" ")
        if tag == "pre":
            preformatted += 1 if event == "start" else -1
        if event == "end":
            if element is not root:
                add(element.tail)
        elif tag in _UNSEEN:
            walk.skip_subtree()
        else:
            pieces.append(_BEGINNINGS.get(tag, ""))
            add(element.text)
    return pieces


def _tidied(text: str) -> str:
    """At most one empty line in a row, and no spaces at the ends of lines."""
    lines = [line.rstrip() for line in text.split("\n")]
    groups = groupby(lines, bool)
    return "\n".join(line for full, group in groups for line in (group if full else ("",))).strip()
