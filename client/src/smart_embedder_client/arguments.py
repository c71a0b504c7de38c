"""What the commands share: the options of service and collection, and text for a terminal."""

import argparse
import json
import os
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

# C0, DEL and C1, which move the cursor or more, and what changes the direction of writing.
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
# Halves of surrogate pairs, which no terminal can be sent.
_HALVES = range(0xD800, 0xE000)
_PLAIN = dict.fromkeys(_CONTROLS, " ") | dict.fromkeys(_HALVES, "\N{REPLACEMENT CHARACTER}")
_ESCAPED = {code: f"\\u{code:04x}" for code in (*_CONTROLS, *_HALVES)}
_QDRANT, _QDRANT_KEY = "QDRANT_URL", "QDRANT_API_KEY"


def plain(text: str) -> str:
    """The text in one line, without its control characters."""
    return text.translate(_PLAIN)


def plain_json(value: Any) -> str:
    """The value as JSON in one line, with its control characters escaped."""
    return json.dumps(value, ensure_ascii=False).translate(_ESCAPED)


def add_common(parser: argparse.ArgumentParser, *, with_collection: bool = True) -> None:
    """Add the options of the service and of the collection."""
    add = parser.add_argument_group("the service").add_argument
    url = os.environ.get(URL_VARIABLE) or DEFAULT_URL
    help_ = f"the address of the service (%(default)s; {URL_VARIABLE})"
    add("--url", type=_checked(resolve_address), default=url, help=help_)
    token, help_ = os.environ.get(TOKEN_VARIABLE), f"the access token ({TOKEN_VARIABLE})"
    add("--token", type=_checked(check_token), default=token, help=help_)
    add = parser.add_argument_group("Qdrant").add_argument
    address = os.environ.get(_QDRANT, "http://127.0.0.1:6333")
    help_ = (
        "http://host:6333; edge:FOLDER for Qdrant Edge; a folder for Qdrant's engine in Python, up "
        f"to 20,000 points (%(default)s; {_QDRANT})"
    )
    add("--qdrant", default=address, metavar="ADDRESS", help=help_)
    if with_collection:
        help_ = "the name of the collection, or an alias of it"
        add("--collection", required=True, metavar="NAME", help=help_)
    key, help_ = os.environ.get(_QDRANT_KEY), f"the key of a server; safer as {_QDRANT_KEY}"
    add("--qdrant-key", default=key, metavar="KEY", help=help_)
    help_ = "use gRPC if the server answers on the port (the default), or HTTP alone"
    add("--grpc", action=argparse.BooleanOptionalAction, default=True, help=help_)
    help_ = "the port of gRPC (%(default)s)"
    add("--grpc-port", type=int, default=6334, metavar="PORT", help=help_)
    help_ = "after how many seconds a request has failed (%(default)s)"
    add("--qdrant-timeout", type=positive, default=60, metavar="SECONDS", help=help_)


def read_target(arguments: argparse.Namespace) -> Target:
    """The collection that the options name; paths become absolute."""
    return Target(
        _absolute(arguments.qdrant),
        arguments.collection,
        api_key=arguments.qdrant_key,
        use_grpc=arguments.grpc,
        grpc_port=arguments.grpc_port,
        timeout=arguments.qdrant_timeout,
    )


def _absolute(address: str) -> str:
    if "://" in address or address == ":memory:":
        return address
    is_edge = address.startswith(EDGE)
    path = str(Path(address.removeprefix(EDGE)).resolve())
    return EDGE + path if is_edge else path


def _checked(check: Callable[[str], str]) -> Callable[[str], str]:
    """The same for argparse, which shows the sentence of its own error alone."""

    def convert(value: str) -> str:
        try:
            return check(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def positive(value: str) -> int:
    """A number of at least 1, for argparse."""
    return _at_least(1, value)


def not_negative(value: str) -> int:
    """A number of at least 0, for argparse."""
    return _at_least(0, value)


def _at_least(least: int, value: str) -> int:
    if int(value) < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return int(value)


def kinds(value: str) -> frozenset[str]:
    """Names of kinds of vectors with commas between them, for argparse."""
    named = frozenset(each.strip() for each in value.split(","))
    if not named <= set(KINDS) or not named & {DENSE, SPARSE}:
        raise argparse.ArgumentTypeError(
            f"{value} is no list of {', '.join(KINDS)} with dense or sparse in it"
        )
    return named
