"""Read PDF and office documents, each file in a process of its own with limited memory.

PDFium reads PDF, and anydoc converts DOCX, ODT, PPTX and RTF to Markdown. Both are native code that
parses untrusted files: if a file crashes it, fills its memory or keeps it busy for minutes, only
that process ends.
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
SUFFIXES = (_PDF, *_FORMATS)
_EXTRA = 'pip install "smart-embedder-client[office]"'
_MAX_MEMORY, _MAX_SECONDS = 2**30, 600
_MAX_CHARACTERS = 2**24
_ENCRYPTED = "is encrypted: save it without its password"
# PDFium returns one of these for a hyphen that divides a word at the end of a line.
_HYPHEN = re.compile("[\ufffe\x02]")
_ENDS_LINE = (".", ":", ";", "!", "?", "{", "}")
# Escapes of Markdown; code, where backslashes are text, matches without a group.
_ESCAPED = re.compile(r"^```.*?^```|`[^`\n]*`|\\([\n!-/:-@\[-`{-~])", re.MULTILINE | re.DOTALL)


class OfficeError(Exception):
    """The file cannot be read; the message continues a sentence that begins with its name."""


@dataclass(frozen=True, slots=True)
class OfficeText:
    """The text of a file; only PDFs have several pages."""

    title: str
    pages: list[str]


def read_office(file: Path) -> OfficeText:
    """Return the text of a file with one of `SUFFIXES`; raises `OfficeError`."""
    package = "pypdfium2" if file.suffix.lower() == _PDF else "anydoc"
    if importlib.util.find_spec(package) is None:
        raise OfficeError(f"needs a package that is not installed: {_EXTRA}")
    # Started by its path: `-m` would import numpy and httpx for each file.
    command = [sys.executable, "-P", __file__, str(file), str(_MAX_MEMORY)]
    try:
        process = subprocess.run(  # noqa: S603 - this interpreter, and the name of a file
            command, capture_output=True, timeout=_MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OfficeError(f"is not read within {_MAX_SECONDS} seconds") from error
    if process.returncode:
        memory = f"{_MAX_MEMORY // 2**20} MiB of memory"
        raise OfficeError(f"cannot be read: its reader crashed, or needs more than {memory}")
    result = json.loads(process.stdout)
    if "error" in result:
        raise OfficeError(result["error"])
    if not any(result["pages"]):
        raise OfficeError("has no text: if its pages are pictures, OCR must read them first")
    return OfficeText(**result)


def _read_pdf(file: Path) -> tuple[str, list[str]]:
    import pypdfium2 as pdfium  # noqa: PLC0415 - only needed for PDF

    try:
        document = pdfium.PdfDocument(file.read_bytes())
        pages = _check_length(
            _join_lines(page.get_textpage().get_text_range()) for page in document
        )
    except pdfium.PdfiumError as error:
        if error.err_code == pdfium.raw.FPDF_ERR_PASSWORD:
            raise OfficeError(_ENCRYPTED) from error
        raise OfficeError(f"is damaged, or no PDF: {error}") from error
    return document.get_metadata_value("Title").strip(), pages


def _check_length(texts: Iterable[str]) -> list[str]:
    """Return the texts as a list; raise `OfficeError` before it is too long."""
    pages: list[str] = []
    left = _MAX_CHARACTERS
    for text in texts:
        left -= len(text)
        if left < 0:
            raise OfficeError(f"has more than the {_MAX_CHARACTERS} characters that are read")
        pages.append(text)
    return pages


def _join_lines(text: str) -> str:
    """Join lines that begin with a small letter to the line before: they are one sentence."""
    lines: list[str] = []
    for line in map(str.strip, _HYPHEN.sub("", text).splitlines()):
        if lines and line[:1].islower() and not lines[-1].endswith(_ENDS_LINE):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(lines).strip()


def _read_document(file: Path) -> tuple[str, list[str]]:
    import anydoc  # noqa: PLC0415 - only needed for these files

    try:
        text = anydoc.to_markdown_bytes(file.read_bytes(), _FORMATS[file.suffix.lower()])
    except anydoc.EncryptedError as error:
        raise OfficeError(_ENCRYPTED) from error
    except anydoc.ConvertError as error:
        raise OfficeError(f"cannot be read: {error}") from error
    return "", _check_length([_ESCAPED.sub(lambda match: match[1] or match[0], text).strip()])


def _main() -> None:
    """Print the text of a file as JSON; the arguments are the file and a memory limit in bytes."""
    file, max_memory = Path(sys.argv[1]), int(sys.argv[2])
    # Windows has no such limit, and macOS does not enforce it.
    if sys.platform == "linux":
        import resource  # noqa: PLC0415 - Windows does not have it

        resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        title, pages = _read_pdf(file) if file.suffix.lower() == _PDF else _read_document(file)
        json.dump({"title": title, "pages": pages}, sys.stdout)
    except OfficeError as error:
        json.dump({"error": str(error)}, sys.stdout)
    except OSError as error:
        json.dump({"error": f"cannot be read: {error.strerror}"}, sys.stdout)


if __name__ == "__main__":
    _main()
