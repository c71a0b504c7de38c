"""docs/other-clients.md shows the tested examples and versions."""

import json
import re

import pytest

from tests.clients.client_process import EXAMPLES, HERE, PAGE, REPOSITORY
from tests.clients.clients import APPLICATIONS, CLIENTS
from tests.clients.recorder import RECORDED, read_requests, stem


def test_every_example_is_tested_and_its_request_is_stored() -> None:
    assert list(EXAMPLES) == list(CLIENTS)
    stored = read_requests(RECORDED)
    for name in [*EXAMPLES, *APPLICATIONS]:
        assert stem(name) in stored, name


def test_shown_versions_are_the_pinned_ones() -> None:
    files = [REPOSITORY / "requirements" / name for name in ("clients.txt", "sie.txt")]
    pins = [pin for file in files for pin in file.read_text().split()]
    node = json.loads((HERE / "package.json").read_text())["dependencies"]
    shown = re.findall(r"^## ([^\n]+)\n\n`(\S+) (\S+)`$", PAGE, re.MULTILINE)
    assert [name for name, _, _ in shown] == list(EXAMPLES)
    for name, package, version in shown:
        if EXAMPLES[name].language == "js":
            assert node[package] == version
        else:
            assert f"{package}=={version}" in pins


@pytest.mark.parametrize(
    ("package", "dialect", "file"),
    [
        ("openai", "openai", "clients.txt"),
        ("cohere", "cohere", "clients.txt"),
        ("sie-sdk", "sie", "sie.txt"),
    ],
)
def test_api_table_and_dialect_name_the_pinned_version(package, dialect, file) -> None:
    pins = (REPOSITORY / "requirements" / file).read_text()
    version = re.search(rf"^{package}==(\d+\.\d+)", pins, re.MULTILINE)
    assert version
    assert f"| `{package}` {version[1]} |" in (REPOSITORY / "docs/api.md").read_text()
    assert f"`{package}` {version[1]} " in (REPOSITORY / f"app/dialects/{dialect}.py").read_text()
