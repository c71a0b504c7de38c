"""Command line options that all commands share, and text that is safe for a terminal."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smart_embedder_client.calls import (
    DEFAULT_URL,
    TOKEN_VARIABLE,
    URL_VARIABLE,
    check_token,
    resolve_address,
)
from smart_embedder_client.qdrant.store import DENSE, EDGE, KINDS, SPARSE, Target

# C0, DEL, C1, and the characters that change the direction of writing.
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
# Lone surrogates, which UTF-8 cannot encode.
_SURROGATES = range(0xD800, 0xE000)
_PLAIN = dict.fromkeys(_CONTROLS, " ") | dict.fromkeys(_SURROGATES, "\N{REPLACEMENT CHARACTER}")
_ESCAPED = {code: f"\\u{code:04x}" for code in (*_CONTROLS, *_SURROGATES)}
_QDRANT, _QDRANT_KEY = "QDRANT_URL", "QDRANT_API_KEY"


def to_line(text: str) -> str:
    """Replace control characters by spaces, which makes one line of the text."""
    return text.translate(_PLAIN)


def to_json_line(value: Any) -> str:
    """Encode the value as JSON in one line, with control characters escaped."""
    return json.dumps(value, ensure_ascii=False).translate(_ESCAPED)


def print_error(sentence: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{to_line(sentence)}\n")


def make_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Make the parser of a command, with the option `--json`."""
    parser = argparse.ArgumentParser(
        prog=f"smart-embedder {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def add_common(parser: argparse.ArgumentParser, *, with_collection: bool = True) -> None:
    """Add the options for the service and the collection."""
    add = parser.add_argument_group("the service").add_argument
    url = os.environ.get(URL_VARIABLE) or DEFAULT_URL
    help_ = f"the address of the service (%(default)s; {URL_VARIABLE})"
    add("--url", type=_checked(resolve_address), default=url, help=help_)
    default, help_ = os.environ.get(TOKEN_VARIABLE), f"the access token ({TOKEN_VARIABLE})"
    add("--token", type=_checked(check_token), default=default, help=help_)
    add = parser.add_argument_group("Qdrant").add_argument
    address = os.environ.get(_QDRANT, "http://127.0.0.1:6333")
    help_ = f"http://host:6333, or edge:FOLDER for Qdrant Edge (%(default)s; {_QDRANT})"
    add("--qdrant", default=address, metavar="ADDRESS", help=help_)
    if with_collection:
        help_ = "the name of the collection, or an alias of it"
        add("--collection", required=True, metavar="NAME", help=help_)
    help_ = f"the API key of a Qdrant server; {_QDRANT_KEY} hides it from other users"
    add("--qdrant-key", default=os.environ.get(_QDRANT_KEY), metavar="KEY", help=help_)
    help_ = "use gRPC if the server answers on its port (the default), or only HTTP"
    add("--grpc", action=argparse.BooleanOptionalAction, default=True, help=help_)
    help_ = "the port for gRPC (%(default)s)"
    add("--grpc-port", type=int, default=6334, metavar="PORT", help=help_)
    help_ = "seconds after which a request to Qdrant fails (%(default)s)"
    add("--qdrant-timeout", type=positive, default=60, metavar="SECONDS", help=help_)


def read_target(arguments: argparse.Namespace) -> Target:
    """Return the collection that the options name, with absolute paths."""
    return Target(
        _make_absolute(arguments.qdrant),
        arguments.collection,
        api_key=arguments.qdrant_key,
        use_grpc=arguments.grpc,
        grpc_port=arguments.grpc_port,
        timeout=arguments.qdrant_timeout,
    )


def _make_absolute(address: str) -> str:
    if not address.startswith(EDGE):
        return address
    return f"{EDGE}{Path(address.removeprefix(EDGE)).resolve()}"


def _checked(check: Callable[[str], str]) -> Callable[[str], str]:
    """Raise `ValueError` as argparse's own error, the only one whose message argparse prints."""

    def convert(value: str) -> str:
        try:
            return check(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def positive(value: str) -> int:
    """Parse a number of at least 1, for argparse."""
    return _parse_integer(value, minimum=1)


def not_negative(value: str) -> int:
    """Parse a number of at least 0, for argparse."""
    return _parse_integer(value, minimum=0)


def _parse_integer(value: str, *, minimum: int) -> int:
    if int(value) < minimum:
        raise argparse.ArgumentTypeError(f"{value} is less than {minimum}")
    return int(value)


def kinds(value: str) -> frozenset[str]:
    """Parse the kinds of vectors, separated by commas, for argparse."""
    named = frozenset(kind.strip() for kind in value.split(","))
    if not named <= set(KINDS) or not named & {DENSE, SPARSE}:
        raise argparse.ArgumentTypeError(
            f"{value} is no list of {', '.join(KINDS)} with dense or sparse in it"
        )
    return named
