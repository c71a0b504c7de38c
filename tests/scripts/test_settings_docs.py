"""The generated documentation of the settings is up to date."""

import pytest

from app.settings import SECTIONS, Settings, sections
from scripts import settings_docs
from tests.support.no_settings import empty_environment  # noqa: F401 - used by each test


def test_env_example_and_the_tables_are_up_to_date() -> None:
    """If this fails: python -m scripts.settings_docs."""
    assert settings_docs.EXAMPLE.read_text("utf-8") == settings_docs.env_example()
    page = settings_docs.PAGE.read_text("utf-8")
    assert page == settings_docs.with_tables(page)


def test_a_page_without_marks_for_every_section_is_an_error() -> None:
    page = "<!-- settings: Address -->\n<!-- /settings -->"
    with pytest.raises(ValueError, match="has marks for"):
        settings_docs.with_tables(page)


def test_every_setting_is_in_one_section_and_has_a_description() -> None:
    assert [*sections()] == [*dict.fromkeys(SECTIONS.values())]
    names = [name for names in sections().values() for name in names]
    assert sorted(names) == sorted(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())
