"""The headers of examples/ and the docs agree with the pinned packages."""

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.support.server import REPOSITORY

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
PINS = (REPOSITORY / "requirements/examples.txt").read_text()
# Modules whose packages have other names.
PACKAGES = {"llama_index.vector_stores": "llama-index-vector-stores-qdrant"}
PACKAGES |= {"llama_index.core": "llama-index-core", "smart_embedder_client": "./client"}

# The client is in this repository.
UNPINNED = {"./client"}
# Dependencies of the named packages.
BROUGHT_ALONG = {"pydantic", "qdrant-client", "httpx", "numpy"}


def named_packages(example: Path) -> set[str]:
    """Return the packages that the header says to install."""
    (line,) = re.findall(r"(?m)^pip install (.+)$", example.read_text())
    return {package.strip('"').partition("[")[0] for package in line.split()}


def imported_packages(example: Path) -> set[str]:
    """Return the packages of its imports at module level."""
    found = set()
    for node in ast.parse(example.read_text()).body:
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            package = next(
                (PACKAGES[module] for module in PACKAGES if name.startswith(module)), None
            )
            found.add(package or name.partition(".")[0].replace("_", "-"))
    return found - {name.replace("_", "-") for name in sys.stdlib_module_names}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_header_lists_pinned_packages_and_the_docs_link_to_it(
    example: Path,
) -> None:
    packages = named_packages(example)
    assert {"./client"} <= packages
    assert all(re.search(rf"(?m)^{package}==", PINS) for package in packages - UNPINNED)
    # Dependencies need not be named.
    assert imported_packages(example) - BROUGHT_ALONG <= packages
    # Submodules of the client may need packages of its extras.
    assert "from smart_embedder_client." not in example.read_text()
    page = (REPOSITORY / "docs" / "hybrid-search.md").read_text()
    assert f"](../examples/{example.name})" in page
