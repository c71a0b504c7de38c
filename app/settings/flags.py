"""The flags of `python -m app`: one for each setting, from the setting's own declaration."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from app.errors import StartupError
from app.settings.describe import default, meaning, sections, without_markup
from app.settings.settings import Settings

_ABOUT = """\
Serve embeddings and reranking over HTTP. Where the client's package is installed, too,
`smart-embedder ingest` and `smart-embedder search` fill a Qdrant collection and ask it; each has
a --help of its own.

Every flag is also a variable of the environment, or a line of .env, in capitals and with
underscores: --max-queue-size is MAX_QUEUE_SIZE. A flag wins over the environment, which wins over
.env. Every user of the machine can read the flags of a process: keep secrets in .env.
"""


def parse_flags(arguments: Sequence[str]) -> dict[str, str]:
    """The settings that are given as flags, by name in lower case; empty ones count as not set.

    Raises `StartupError` for an unknown flag; `--help` prints all flags and ends the process.
    """
    known, unknown = _parser().parse_known_args(arguments)
    if unknown:
        raise StartupError(_unknown(unknown[0]))
    return {name: value for name, value in vars(known).items() if value}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise the message alone: argparse would print a usage of fifty flags."""
        raise StartupError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m app",
        usage="python -m app [--SETTING VALUE ...]",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for title, names in sections().items():
        group = parser.add_argument_group(title)
        for name in names:
            if Settings.model_fields[name].annotation is bool:
                group.add_argument(
                    _flag(name), help=_help(name), metavar="true|false", nargs="?", const="true"
                )
            else:
                group.add_argument(_flag(name), help=_help(name), metavar="VALUE")
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(name: str) -> str:
    ending = f" (default: {default(name)})" if default(name) else ""
    return f"{without_markup(meaning(name))}{ending}".replace("%", "%%")


def _unknown(argument: str) -> str:
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return "flags begin with --, and one of the arguments belongs to none"
    (nearest,) = get_close_matches(
        "--" + flag.lstrip("-"), map(_flag, Settings.model_fields), n=1, cutoff=0
    )
    return f"there is no flag {flag}: the nearest is {nearest}; --help lists all"
