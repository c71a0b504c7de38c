"""What documents say of settings is made of the declarations, and up to date."""

import pytest

from app.settings import SECTIONS, Settings, sections
from scripts import settings_docs
from tests.support.no_settings import empty_environment  # noqa: F401 - used by each test


def test_env_example_and_the_tables_are_what_the_script_makes() -> None:
    """Where this fails: python -m scripts.settings_docs."""
    assert settings_docs.EXAMPLE.read_text("utf-8") == settings_docs.env_example()
    page = settings_docs.PAGE.read_text("utf-8")
    assert page == settings_docs.with_tables(page)


def test_a_page_without_a_place_for_every_section_is_refused() -> None:
    page = "<!-- settings: Address -->\n<!-- /settings -->"
    with pytest.raises(ValueError, match="has marks for"):
        settings_docs.with_tables(page)


def test_every_setting_is_in_one_section_and_has_a_meaning() -> None:
    assert [*sections()] == [*dict.fromkeys(SECTIONS.values())]
    names = [name for names in sections().values() for name in names]
    assert sorted(names) == sorted(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())


def test_only_the_tables_of_a_page_are_replaced() -> None:
    places = [
        f"<!-- settings: {title} -->\nan earlier table\n<!-- /settings -->\n"
        for title in settings_docs.tables()
    ]
    page = settings_docs.with_tables("before\n" + "between\n".join(places) + "after\n")
    assert page.startswith(
        "before\n<!-- settings: Address -->\n\n| setting | default | meaning |\n"
    )
    assert page.count("between\n") == len(places) - 1
    assert page.endswith("<!-- /settings -->\nafter\n")
    assert "an earlier table" not in page
