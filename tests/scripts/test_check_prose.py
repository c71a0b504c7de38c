"""The linter of the documentation's prose: it finds its words in sentences and nowhere else."""

from pathlib import Path

import pytest

from scripts.check_prose import defects_of


@pytest.mark.parametrize(
    ("text", "line", "check"),
    [
        ("It reads the\nthe weights.", 1, "lexical_illusions"),
        ("It waits for ever.", 1, "archaism"),
        ("# Title\n\nThey repeat the same.", 3, "redundancy"),
        ("The model, the last layer of\nwhich is skipped.", 1, "project.phrases"),
        ("# Title\n\n- What it reads is cut.", 3, "project.openings"),
        ("It reads. What is longer is cut.", 1, "project.openings"),
    ],
)
def test_a_defect_is_found_in_its_line(tmp_path: Path, text: str, line: int, check: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    (defect,) = defects_of(page)
    assert defect.startswith(f"{page}:{line}: ")
    assert check in defect


@pytest.mark.parametrize(
    "text",
    [
        "# What it needs\n\nNothing.",
        "# Start\n\nStart it.",
        "| text | texts |\n|---|---|\n| one | one |",
        "In float32 2.12 texts, in int8 8.",
        "```\nWhat it is\n```\n\n`What it is`, <!-- of which --> and the [guide](of-which.md).",
    ],
)
def test_code_headings_cells_and_numbers_have_none(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert list(defects_of(page)) == []
