"""The options of both commands: the service and the collection."""

import argparse
import os
from pathlib import Path

from smart_embedder_client.calls import (
    DEFAULT_URL,
    TOKEN_VARIABLE,
    URL_VARIABLE,
    address_of,
    token_of,
)
from smart_embedder_client.qdrant.layout import COLBERT, DENSE, SPARSE
from smart_embedder_client.qdrant.open_store import EDGE, Target

_QDRANT, _QDRANT_KEY = "QDRANT_URL", "QDRANT_API_KEY"
_KINDS = (DENSE, SPARSE, COLBERT)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options of the service and of the collection."""
    _add_service(parser.add_argument_group("the service"))
    _add_qdrant(parser.add_argument_group("Qdrant"))


def _add_service(service: "argparse._ArgumentGroup") -> None:
    service.add_argument(
        "--url",
        type=_address,
        default=os.environ.get(URL_VARIABLE) or DEFAULT_URL,
        help=f"the address of the service (%(default)s; {URL_VARIABLE})",
    )
    service.add_argument(
        "--token",
        type=_token,
        default=os.environ.get(TOKEN_VARIABLE),
        help=f"the access token ({TOKEN_VARIABLE})",
    )


def _add_qdrant(qdrant: "argparse._ArgumentGroup") -> None:
    qdrant.add_argument(
        "--qdrant",
        default=os.environ.get(_QDRANT, "http://127.0.0.1:6333"),
        metavar="ADDRESS",
        help="http://host:6333; edge:FOLDER for Qdrant Edge; a folder for Qdrant's engine in "
        f"Python, up to 20,000 points (%(default)s; {_QDRANT})",
    )
    qdrant.add_argument(
        "--collection", required=True, metavar="NAME", help="the name of the collection"
    )
    qdrant.add_argument(
        "--qdrant-key",
        default=os.environ.get(_QDRANT_KEY),
        metavar="KEY",
        help=f"the key of a server; safer as {_QDRANT_KEY}",
    )
    qdrant.add_argument(
        "--grpc",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use gRPC if the server answers on the port (the default), or HTTP alone",
    )
    qdrant.add_argument(
        "--grpc-port", type=int, default=6334, metavar="PORT", help="the port of gRPC (%(default)s)"
    )
    qdrant.add_argument(
        "--qdrant-timeout",
        type=positive,
        default=60,
        metavar="SECONDS",
        help="after how many seconds a request has failed (%(default)s)",
    )


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


def _address(value: str) -> str:
    try:
        return address_of(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _token(value: str) -> str:
    try:
        return token_of(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(value: str) -> int:
    """A number of at least 1, for argparse."""
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return number


def not_negative(value: str) -> int:
    """A number of at least 0, for argparse."""
    number = int(value)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return number


def kinds(value: str) -> frozenset[str]:
    """Names of kinds of vectors with commas between them, for argparse."""
    named = frozenset(each.strip() for each in value.split(","))
    if not named <= set(_KINDS) or not named & {DENSE, SPARSE}:
        raise argparse.ArgumentTypeError(
            f"{value} is no list of {', '.join(_KINDS)} with dense or sparse in it"
        )
    return named
