"""The test files and folders that scripts name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/*.py"), ROOT / "run_tests.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_test_that_a_script_names_exists(script: Path) -> None:
    paths = re.findall(r"(?<![-\w/.])tests/[\w/*-]+(?:\.(?:py|json|toml))?", script.read_text())
    assert [path for path in paths if not [*ROOT.glob(path.rstrip("/"))]] == []
