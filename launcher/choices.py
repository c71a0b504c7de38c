"""What the user has chosen: by arguments, by the environment or by .env."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODES = ("local", "docker")
FLAVOURS = ("cpu", "gpu", "auto")

# Not python-dotenv, which is not installed yet: .env says which torch to install (DEVICE), what not
# to ask for and which port must be free, and with Docker nothing is installed here at all.
_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?'?([^=#\s']+)'?\s*=\s*(.*)")
_QUOTED = re.compile(r"""(['"])(.*?)(?<!\\)\1""")


@dataclass(frozen=True, slots=True)
class Request:
    """What the arguments ask for."""

    mode: str
    flavour: str
    demo: bool


def parse_arguments(arguments: Sequence[str]) -> Request | None:
    """Read `[local|docker] [cpu|gpu|auto] [--demo]` in any case; None where it is anything else."""
    words = [argument.lower() for argument in arguments]
    demo = "--demo" in words
    words = [word for word in words if word != "--demo"]
    mode = words.pop(0) if words and words[0] in MODES else "docker"
    flavour = words.pop(0) if words and words[0] in FLAVOURS else "auto"
    if words or (demo and mode != "local"):
        return None
    return Request(mode, flavour, demo)


def settings_in_force(environment: Mapping[str, str], dotenv: Path) -> dict[str, str]:
    """Return what is set, as the app sees it: names in any case, empty values not at all.

    The environment wins over .env, except that an empty variable does not hide a line of .env.
    """
    text = dotenv.read_text("utf-8", errors="replace") if dotenv.is_file() else ""
    settings: dict[str, str] = {}
    for variables in (read_dotenv(text), environment):
        settings |= {name.upper(): value for name, value in variables.items() if value}
    return settings


def read_dotenv(text: str) -> dict[str, str]:
    """Read the `NAME=value` lines of a .env file; the last one for a name counts."""
    assignments = (_ASSIGNMENT.fullmatch(line) for line in text.splitlines())
    return {found[1]: _unquote(found[2]) for found in assignments if found}


def _unquote(value: str) -> str:
    if quoted := _QUOTED.match(value):
        return quoted[2]
    return re.sub(r"\s+#.*", "", value).rstrip()
