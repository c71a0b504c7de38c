"""`smart-embedder check`: compare the vector spaces of a collection and of the service."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from smart_embedder_client import arguments as common
from smart_embedder_client.arguments import print_error, to_json_line, to_line
from smart_embedder_client.client import Client
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.qdrant import open_store
from smart_embedder_client.qdrant.store import KINDS, QdrantError, reembed_command, vector_options

_ABOUT = """\
Compare the vector space ids that are stored in a collection with those of the service.

The exit status is 0 if they are equal, 1 if one differs, and 2 if they could not be compared.
"""
Spaces = Mapping[str, str]


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 1 if an id differs, and 2 if they could not be compared."""
    parsed = _parser().parse_args(arguments)
    try:
        stored, served = _read_spaces(parsed)
    except (QdrantError, SmartEmbedderError) as error:
        print_error(str(error))
        return 2
    is_same = stored == served
    if parsed.json:
        result = {"collection": parsed.collection, "stored": stored, "served": served}
        sys.stdout.write(f"{to_json_line(result | {'same': is_same})}\n")
    else:
        lines = _describe(parsed.collection, stored, served)
        sys.stdout.writelines(f"{to_line(line)}\n" for line in lines)
    return 0 if is_same else 1


def _read_spaces(parsed: argparse.Namespace) -> tuple[Spaces, Spaces]:
    """Return the id of each kind in the collection, and that of the service."""
    target = common.read_target(parsed)
    with Client(parsed.url, token=parsed.token) as client, closing(open_store(target)) as store:
        origin = store.origin()
        stored = {} if origin is None else origin.vector_space
        stored = {kind: stored[kind] for kind in KINDS if kind in stored}
        if not stored:
            raise QdrantError(
                f"there is no collection {target.collection} that says in which space its vectors "
                "are"
            )
        if any(space.count("-") > 1 for space in stored.values()):
            raise QdrantError(
                f"the collection {target.collection} has long ids of an earlier version, which "
                f"cannot be compared: {reembed_command(target.collection)} embeds its texts again"
            )
        options = vector_options(stored, "float32", [])
        return stored, client.embed_documents(["space"], **options).vector_space


def _describe(collection: str, stored: Spaces, served: Spaces) -> Iterator[str]:
    for kind, space in stored.items():
        if served.get(kind) == space:
            yield f"{kind}: the same space, {space}"
        else:
            other = served.get(kind, "none")
            yield f"{kind}: another space, {other} of the service, {space} stored"
    if stored != served:
        yield f"To embed the texts again: {reembed_command(collection)}"


def _parser() -> argparse.ArgumentParser:
    parser = common.make_parser("check", _ABOUT)
    help_ = "the name of the collection, or an alias of it"
    parser.add_argument("collection", metavar="COLLECTION", help=help_)
    common.add_common(parser, with_collection=False)
    return parser
