"""Read PDF and office documents, each file in a process of its own with limited memory.

PDFium reads PDF, and anydoc converts DOCX, ODT, PPTX and RTF to Markdown. Both are native code that
parses untrusted files: a file that crashes it, fills its memory or keeps it busy for minutes ends
that process alone.
"""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_PDF = ".pdf"
_FORMATS: Mapping[str, Literal["docx", "odt", "pptx", "rtf"]] = {
    ".docx": "docx",
    ".odt": "odt",
    ".pptx": "pptx",
    ".rtf": "rtf",
}
ENDINGS = (_PDF, *_FORMATS)
_EXTRA = 'pip install "smart-embedder-client[office]"'
_MOST_MEMORY, _MOST_SECONDS = 2**30, 600
_MOST_CHARACTERS = 2**24
_ENCRYPTED = "is encrypted: save it without its password"
# PDFium puts one of these in place of a hyphen that divides a word at the end of a line.
_HYPHEN = re.compile("[\ufffe\x02]")
_ENDS_LINE = (".", ":", ";", "!", "?", "{", "}")
# Markdown's escapes, but not in code.
_ESCAPED = re.compile(r"^```.*?^```|`[^`\n]*`|\\([\n!-/:-@\[-`{-~])", re.MULTILINE | re.DOTALL)


class OfficeError(Exception):
    """The file cannot be read; with the file's name before it the message is a sentence."""


@dataclass(frozen=True, slots=True)
class OfficeText:
    """The text of a file: a PDF has several pages, other documents one."""

    title: str
    pages: list[str]


def read_office(file: Path) -> OfficeText:
    """The text of a file, whose ending is one of `ENDINGS`; raises `OfficeError`."""
    package = "pypdfium2" if file.suffix.lower() == _PDF else "anydoc"
    if importlib.util.find_spec(package) is None:
        raise OfficeError(f"needs a package that is not installed: {_EXTRA}")
    # By its path, since `-m` would import numpy and httpx for each file.
    command = [sys.executable, "-P", __file__, str(file), str(_MOST_MEMORY)]
    try:
        process = subprocess.run(  # noqa: S603 - this interpreter, and the name of a file
            command, capture_output=True, timeout=_MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OfficeError(f"is not read within {_MOST_SECONDS} seconds") from error
    if process.returncode:
        memory = f"{_MOST_MEMORY // 2**20} MiB of memory"
        raise OfficeError(f"cannot be read: its reader crashed, or needs more than {memory}")
    found = json.loads(process.stdout)
    if "error" in found:
        raise OfficeError(found["error"])
    if not any(found["pages"]):
        raise OfficeError("has no text: if its pages are pictures, OCR must read them first")
    return OfficeText(**found)


def _pdf(file: Path) -> tuple[str, list[str]]:
    import pypdfium2 as pdfium  # noqa: PLC0415 - PDF alone needs it

    try:
        document = pdfium.PdfDocument(file.read_bytes())
        pages = _limited(_joined(page.get_textpage().get_text_range()) for page in document)
    except pdfium.PdfiumError as error:
        if error.err_code == pdfium.raw.FPDF_ERR_PASSWORD:
            raise OfficeError(_ENCRYPTED) from error
        raise OfficeError(f"is damaged, or no PDF: {error}") from error
    return document.get_metadata_value("Title").strip(), pages


def _limited(texts: Iterable[str]) -> list[str]:
    pages: list[str] = []
    left = _MOST_CHARACTERS
    for text in texts:
        left -= len(text)
        if left < 0:
            raise OfficeError(f"has more than the {_MOST_CHARACTERS} characters that are read")
        pages.append(text)
    return pages


def _joined(text: str) -> str:
    """Join a line that begins with a small letter to the one before: both are of one sentence."""
    lines: list[str] = []
    for line in map(str.strip, _HYPHEN.sub("", text).splitlines()):
        if lines and line[:1].islower() and not lines[-1].endswith(_ENDS_LINE):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(lines).strip()


def _document(file: Path) -> tuple[str, list[str]]:
    import anydoc  # noqa: PLC0415 - these files alone need it

    try:
        text = anydoc.to_markdown_bytes(file.read_bytes(), _FORMATS[file.suffix.lower()])
    except anydoc.EncryptedError as error:
        raise OfficeError(_ENCRYPTED) from error
    except anydoc.ConvertError as error:
        raise OfficeError(f"cannot be read: {error}") from error
    return "", _limited([_ESCAPED.sub(lambda found: found[1] or found[0], text).strip()])


def _main() -> None:
    """Print what `read_office` returns, for the file and the bytes of the command line."""
    file, most_memory = Path(sys.argv[1]), int(sys.argv[2])
    # Windows has no such limit, and macOS does not enforce it.
    if sys.platform == "linux":
        import resource  # noqa: PLC0415 - Windows does not have it

        resource.setrlimit(resource.RLIMIT_AS, (most_memory, most_memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        title, pages = _pdf(file) if file.suffix.lower() == _PDF else _document(file)
        json.dump({"title": title, "pages": pages}, sys.stdout)
    except OfficeError as error:
        json.dump({"error": str(error)}, sys.stdout)
    except OSError as error:
        json.dump({"error": f"cannot be read: {error.strerror}"}, sys.stdout)


if __name__ == "__main__":
    _main()
