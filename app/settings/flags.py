"""The flags of `python -m app`: one for each setting, from the setting's own declaration."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from app.errors import StartupError
from app.settings.declaration import Settings
from app.settings.spelling import nearest

_ABOUT = """\
Serve embeddings and reranking over HTTP.

Every flag is also a variable of the environment, or a line of .env, in capitals and with
underscores: --max-queue-size is MAX_QUEUE_SIZE. A flag wins over the environment, which wins over
.env. Every user of the machine can read the flags of a process: keep secrets in .env.
"""


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """The settings that are given as flags, by name in lower case; empty ones count as not set.

    Raises `StartupError` for a flag that there is none of; `--help` prints all and ends the
    process.
    """
    known, unknown = _parser().parse_known_args(arguments)
    if unknown:
        raise StartupError(_unknown(unknown[0]))
    return {name: value for name, value in vars(known).items() if value}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Argparse would print a usage of fifty flags."""
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
    for name, field in Settings.model_fields.items():
        if field.annotation is bool:
            parser.add_argument(
                _flag(name), help=_help(field), metavar="true|false", nargs="?", const="true"
            )
        else:
            parser.add_argument(_flag(name), help=_help(field), metavar="VALUE")
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(field: FieldInfo) -> str:
    default = field.default
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    elif isinstance(default, bool):
        default = str(default).lower()
    ending = "" if default is None else f" (default: {default})"
    return f"{field.description}{ending}".replace("%", "%%")


def _unknown(argument: str) -> str:
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return "flags begin with --, and one of the arguments belongs to none"
    meant = nearest("--" + flag.lstrip("-"), map(_flag, Settings.model_fields))
    return f"there is no flag {flag}: the nearest is {meant}; --help lists all"
