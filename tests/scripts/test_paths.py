"""Scripts name test files and folders, which move."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/*.py"), ROOT / "run_tests.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_test_that_a_script_names_is_there(script: Path) -> None:
    named = re.findall(r"(?<![-\w/.])tests/[\w/*-]+(?:\.(?:py|json|toml))?", script.read_text())
    assert [each for each in named if not [*ROOT.glob(each.rstrip("/"))]] == []
