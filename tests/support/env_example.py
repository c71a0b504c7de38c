"""What .env.example lists: the settings, and behind their own heading what only others read."""

import re

from tests.support.server import REPOSITORY

_OTHERS = "# --- Read by docker compose, and not by the service ---"


def listed_settings() -> dict[str, str]:
    """The default of every setting."""
    return _defaults(_parts()[0])


def listed_for_others() -> dict[str, str]:
    """The default of every variable that the service does not read."""
    return _defaults(_parts()[1])


def _parts() -> tuple[str, str]:
    text = (REPOSITORY / ".env.example").read_text(encoding="utf-8")
    settings, heading, others = text.partition(_OTHERS)
    assert heading
    return settings, others


def _defaults(text: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^#?\s?([A-Z][A-Z0-9_]+)=(.*)$", text))
