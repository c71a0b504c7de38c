"""The code blocks of README.md, SECURITY.md and docs/, found and run by Sybil.

Sybil takes an evaluator for each language. pytest-examples and pytest-markdown-docs run Python
alone, mktestdocs cannot skip a block, and pytest-codeblocks compares numbers in output literally.

- A `bash` block runs in a process of its own, a `python` block in this one, which has torch.
  Both use the server of the fixture `demo`.
- A `json` or `text` block is compared with the output of the block before it.
- An `ini` block holds lines of .env.
- `<!-- skip: next "reason" -->` before a block, or `skip: start`, leaves it out.
"""

import io
import json
import re
from contextlib import chdir, redirect_stdout
from typing import Any

from dotenv import dotenv_values
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from app.settings import Settings
from tests.docs.checkout import BASH, run_command
from tests.support.server import REPOSITORY

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "SECURITY.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]


_GAP = "..."
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")


def run_bash(example: Example) -> None:
    """Run a block, and keep its output for the block after it."""
    # The address is for the programs in examples/.
    script = f"export SMART_EMBEDDER_URL={example.namespace['url']}\n{script_of(example)}"
    command = [BASH, "-e", "-o", "pipefail", "-c", script]
    example.namespace["printed"] = run_command(command, example.namespace["checkout"])


def run_python(example: Example) -> None:
    """Run a block, and keep its output for the block after it."""
    code = compile(script_of(example), f"{example.path}:{example.line}", "exec")
    with chdir(example.namespace["checkout"]), redirect_stdout(io.StringIO()) as printed:
        exec(code, {"__name__": "__main__"})
    example.namespace["printed"] = printed.getvalue()


def script_of(example: Example) -> str:
    """Return the block with the address of the test's server in place of the examples' address."""
    text = str(example.parsed)
    for address in ("http://127.0.0.1:8000", "http://localhost:8000"):
        text = text.replace(address, example.namespace["url"])
    return text


def check_json(shown: Any, printed: Any) -> None:
    """Assert that every field shown was printed, with a value of the same type."""
    assert is_part(shape(shown), shape(printed)), f"{shape(shown)}\n{shape(printed)}"


def shape(value: Any) -> Any:
    """Return the keys and types of a JSON value; of a list those of its first item."""
    match value:
        case dict():
            return {"#" if key.isdecimal() else key: shape(item) for key, item in value.items()}
        case list():
            return [shape(item) for item in value[:1]]
        case bool() | None | str():
            return type(value).__name__
        case _:
            return "number"


def is_part(part: Any, whole: Any) -> bool:
    """Return whether `whole` has everything that `part` has."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and is_part(item, whole[key]) for key, item in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return not part or (bool(whole) and is_part(part[0], whole[0]))
    return bool(part == whole)


def check_lines(shown: str, printed: str) -> None:
    """Assert that the lines shown were printed one after the other.

    Other lines may precede the first one, and stand in place of `...`. Numbers and the width of
    spaces may differ.
    """
    printed_lines = [_normalize(line) for line in printed.splitlines()]
    position, gap = 0, True
    for line in shown.splitlines():
        if line.strip() == _GAP:
            gap = True
            continue
        expected, candidates = _normalize(line), range(position, len(printed_lines))
        found = next((i for i in candidates if printed_lines[i] == expected), None)
        assert found is not None, f"{line!r} is not in\n{printed}"
        assert gap or found == position, f"something stands before {line!r} in\n{printed}"
        position, gap = found + 1, False


def _normalize(line: str) -> str:
    return " ".join(_NUMBER.sub("#", line).split())


def check_settings(example: Example) -> None:
    values = dotenv_values(stream=io.StringIO(example.parsed))
    settings = {name.lower(): value for name, value in values.items()}
    assert settings.keys() <= Settings.model_fields.keys()
    Settings(**settings)


def check_shown_json(example: Example) -> None:
    check_json(json.loads(example.parsed), json.loads(example.namespace.pop("printed")))


def check_shown_lines(example: Example) -> None:
    check_lines(example.parsed, example.namespace.pop("printed"))


DOCUMENTATION = Sybil(
    parsers=[
        CodeBlockParser("bash", run_bash),
        CodeBlockParser("python", run_python),
        CodeBlockParser("json", check_shown_json),
        CodeBlockParser("text", check_shown_lines),
        CodeBlockParser("ini", check_settings),
        SkipParser(),
    ]
)
