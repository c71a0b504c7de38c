"""Check the prose of the documentation with proselint: `python -m scripts.check_prose [FILE...]`.

proselint knows no Markdown, so code, link targets and comments are blanked first. Only those of its
checks run that have found defects in these pages, and `PROJECT_CHECKS`, which finds phrases that
this project avoids.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from proselint.checks import __register__ as checks_of_proselint
from proselint.registry.checks import Check, Padding
from proselint.registry.checks.engine import Fancy, RegexOptions
from proselint.registry.checks.types import ExistenceSimple
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "client" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
# "archaism" found "for ever", "redundancy" "repeat the same", "lexical_illusions" a doubled word.
ENABLED = ("archaism", "lexical_illusions", "redundancy")

_PHRASES = (
    "but for",
    "for that reason",
    "in any company",
    "of theirs",
    "of which",
    "of yours",
    "on this day",
    "that there are",
)
PROJECT_CHECKS = (
    Check(
        check_type=ExistenceSimple(
            pattern=Padding.STRICT_WORDS_IN_TEXT.format(
                Padding.safe_join([words.replace(" ", r"\s+") for words in _PHRASES])
            )
        ),
        path="project.phrases",
        message="'{}': say it in two sentences, with 'except', or with the noun.",
        engine=Fancy(),
    ),
    Check(
        # Not in headings, where a clause is a title.
        check_type=ExistenceSimple(
            pattern=r"(?:^(?:- |\d+\. )?|[.:] )(?:What|Whether|That which)(?: \S+){1,4}"
        ),
        path="project.openings",
        message="'{}': begin with who does something.",
        engine=Fancy(RegexOptions(case_insensitive=False, multi_line=True)),
    ),
)
CHECKS = (
    *(check for check in checks_of_proselint if any(map(check.matches_partial, ENABLED))),
    *PROJECT_CHECKS,
)
_NO_PROSE = re.compile(
    r"^( *)```.*?^\1```$|<!--.*?-->|`[^`\n]+`|(?<=\])\([^)\s]+\)|https?://\S+|\b\w*\d[\w.,]*",
    re.MULTILINE | re.DOTALL,
)


def prose_of(markdown: str) -> str:
    """Replace code, links, comments and numbers by dots, so that each line keeps its number."""
    text = _NO_PROSE.sub(lambda match: re.sub(r"\S", ".", match[0]), markdown)
    # A heading ends a sentence, and so does a cell: what follows repeats no word of it.
    return re.sub(r"(?m)^#.*$", lambda match: f"{match[0]}.", text).replace("|", ".")


def defects_of(page: Path) -> Iterator[str]:
    """Yield a line for each defect of a page."""
    file = LintFile(page.name, prose_of(page.read_text(encoding="utf-8")))
    for check in CHECKS:
        for found in check.check_with_flags(file.content):
            line, _ = file.line_col_of(found.span[0] + 1)
            yield f"{page}:{line}: {found.message} ({found.check_path})"


def main(pages: list[Path]) -> int:
    """Print the defects of the pages; 1 if there are any."""
    lines = [line for page in pages for line in defects_of(page)]
    print("\n".join(lines) or f"No defects in {len(pages)} pages.")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]] or PAGES))
