"""A fixture for tests of settings, without other variables and .env files."""

from pathlib import Path

import pytest

from app.settings import Settings


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.chdir(tmp_path)
