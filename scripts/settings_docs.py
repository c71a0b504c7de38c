"""Writes .env.example and the tables of docs/configuration.md from the declared settings.

    python -m scripts.settings_docs

In docs/configuration.md only what stands between `<!-- settings: TITLE -->` and
`<!-- /settings -->` is replaced, by the table of the section with that title.
"""

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from smart_embedder.settings.declaration import default, meaning, sections, without_markup
from smart_embedder.settings.sources import COMPOSE_VARIABLES

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / ".env.example"
PAGE = ROOT / "docs" / "configuration.md"
COMPOSE_TITLE = "Read by docker compose, and not by the service"
_WIDTH = 100
_HEAD = """\
# Every setting with its default. Copy to .env and take the # away from what you change.
# An empty value counts as not set; a wrong one stops the start and says what is allowed, and so
# does a name that is not in this file. Each is a flag, too:
# python -m smart_embedder --max-queue-size 50
# Made by scripts/settings_docs.py from smart_embedder/settings.
"""
_PLACE = re.compile(r"(<!-- settings: ([^\n]+) -->\n).*?(<!-- /settings -->)", re.DOTALL)


def env_example() -> str:
    """The whole of .env.example."""
    groups = {
        title: [(name.upper(), default(name), meaning(name)) for name in names]
        for title, names in sections().items()
    }
    parts = [_section(title, lines) for title, lines in groups.items()]
    return "\n".join([_HEAD, *parts, _section(COMPOSE_TITLE, COMPOSE_VARIABLES)])


def _section(title: str, variables: Iterable[tuple[str, str, str]]) -> str:
    lines = [f"# --- {title} ---"]
    for name, value, text in variables:
        sentence = without_markup(text[0].upper() + text[1:] + ".")
        lines += textwrap.wrap(sentence, _WIDTH, initial_indent="# ", subsequent_indent="# ")
        lines.append(f"# {name}={value}")
    return "\n".join(lines) + "\n"


def with_tables(page: str) -> str:
    """A page with the table of each section in its place; `ValueError` where one has none."""
    places = [title for _, title, _ in _PLACE.findall(page)]
    if sorted(places) != sorted(sections()):
        raise ValueError(
            f"{PAGE.name} has places for {places}, and the sections are {[*sections()]}"
        )
    return _PLACE.sub(lambda found: f"{found[1]}{_table(found[2])}\n{found[3]}", page)


def _table(title: str) -> str:
    rows = []
    for name in sections()[title]:
        value, text = f"`{default(name)}`" if default(name) else "not set", meaning(name)
        full_stop = "." if ". " in text else ""
        rows.append(f"| `{name.upper()}` | {value} | {text}{full_stop} |")
    return "\n".join(["", "| setting | default | meaning |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    EXAMPLE.write_text(env_example(), "utf-8")
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
