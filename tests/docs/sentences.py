"""Every sentence that the sources of the product can say, with gaps where values come in."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.server import REPOSITORY

GAP = "\0"
_FAIL = re.compile(r'(?:fail|echo) "((?:[^"\\]|\\.)*)"', re.DOTALL)
_SHELL_VALUE = re.compile(r"\$\{[^}]*\}|\$[A-Za-z_@*]\w*|%\w+%")


@cache
def said() -> tuple[str, ...]:
    """The strings in app/, launcher/ and the start scripts."""
    found = [text for file in _python_files() for text in _strings(file)]
    for name in ("start_server.sh", "start_server.bat"):
        script = (REPOSITORY / name).read_text(encoding="utf-8")
        texts = _FAIL.findall(script) if name.endswith("sh") else script.splitlines()
        found += [_SHELL_VALUE.sub(GAP, text) for text in texts]
    return tuple(found)


def can_be_said(quote: str) -> bool:
    """Whether the product can say `quote`, in which `...` stands for anything."""
    parts = [part.strip() for part in quote.split("...")]
    return any(_in_order(parts, text) for text in said())


def _in_order(parts: list[str], text: str) -> bool:
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def _python_files() -> list[Path]:
    return sorted([*(REPOSITORY / "app").rglob("*.py"), *(REPOSITORY / "launcher").rglob("*.py")])


def _strings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(_piece(value) for value in node.values)


def _piece(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else GAP
