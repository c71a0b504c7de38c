"""Which test files `--fast` leaves out: those that start processes, references or browsers.

Told by what a file imports, itself or by way of other files of the tests, and by the fixtures that
it names. A file is in or out as a whole; only what takes long is marked, as `long`.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# Transformers is the reference of the models, also in `tools.matrix`, and makes tiny checkpoints.
_SLOW = {"subprocess", "multiprocessing", "playwright"}
_SLOW |= {"FlagEmbedding", "sentence_transformers", "transformers", "tools.matrix"}
# Of all files only the imports are looked for: to parse them takes seconds.
_IMPORT = re.compile(r"^ *(?:import ([\w.]+)|from ([\w.]+) import (\([^)]*\)|.*))", re.MULTILINE)


def left_out(path: Path) -> bool:
    """Return whether this test file, or a fixture that it names, does what takes long.

    A folder is left out with all of its files, so that its conftest.py is not imported.
    """
    return all(map(_file_left_out, path.rglob("test_*.py") if path.is_dir() else [path]))


@cache
def _file_left_out(file: Path) -> bool:
    if _module(file) in _slow_modules():
        return True
    nodes = list(ast.walk(_parsed(file)))
    named = {node.arg for node in nodes if isinstance(node, ast.arg)}
    # As for `request.getfixturevalue`.
    named |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return bool(named & _slow_fixtures(file.parent))


@cache
def _slow_modules() -> set[str]:
    imported = {_module(file): set(_modules_in(file)) for file in TESTS.rglob("*.py")}
    slow = set(_SLOW)
    while more := {module for module, names in imported.items() if names & slow} - slow:
        slow |= more
    return slow


@cache
def _slow_fixtures(folder: Path) -> set[str]:
    """The fixtures at hand in `folder` that use, or whose helpers use, what a slow file defines."""
    uses: dict[str, set[str]] = {}
    # Those of the plugin, which tests/conftest.py does not load for these tests.
    plugin = _parsed(TESTS / "support" / "fixtures.py")
    slow = {node.name for node in plugin.body if isinstance(node, ast.FunctionDef)}
    above = [f / "conftest.py" for f in (folder, *folder.parents) if f.is_relative_to(TESTS)]
    for tree in map(_parsed, filter(Path.exists, above)):
        slow |= {name for module, name in _imports(tree) if module in _slow_modules()}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                within = list(ast.walk(node))
                uses[node.name] = {n.id for n in within if isinstance(n, ast.Name)}
                uses[node.name] |= {n.arg for n in within if isinstance(n, ast.arg)}
    while more := {name for name, used in uses.items() if used & slow} - slow:
        slow |= more
    return slow


def _modules_in(file: Path) -> Iterator[str]:
    """The modules, packages and members that a file imports."""
    for plain, package, names in _IMPORT.findall(file.read_text(encoding="utf-8")):
        module = plain or package
        yield from (module, module.partition(".")[0])
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", names))


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The modules that are imported, also inside of functions, each with the name that it gives."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                yield from ((alias.name, name), (alias.name.partition(".")[0], name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = alias.asname or alias.name
                yield from ((node.module, name), (f"{node.module}.{alias.name}", name))
                yield node.module.partition(".")[0], name


def _module(file: Path) -> str:
    return ".".join(file.relative_to(TESTS.parent).with_suffix("").parts)


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
