"""`smart-embedder check`: compare the vector spaces of a collection and of the service."""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

from smart_embedder_client import arguments as common
from smart_embedder_client.arguments import print_error, to_json_line, to_line
from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.ingest.collection import ask_service
from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.ingest.pace import Patience
from smart_embedder_client.qdrant import open_store
from smart_embedder_client.qdrant.store import KINDS, QdrantError, Target, reembed_command

_PATIENCE = 60.0
_ABOUT = """\
Compare the vector space ids that are stored in a collection with those of the service.

The exit status is 0 if they are equal, 1 if one differs, and 2 if they could not be compared.
"""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a comparison.

    Attributes:
        collection: The name of the collection.
        stored: The id of the vector space of each kind in the collection.
        served: The id of the vector space of each kind that the service makes.
    """

    collection: str
    stored: Mapping[str, str]
    served: Mapping[str, str]

    @property
    def is_same(self) -> bool:
        """Whether the service's vectors may be compared with those of the collection."""
        return self.stored == self.served


async def check(target: Target, url: str, token: str | None) -> Result:
    """Compare the vector spaces of a collection with those of the service.

    Raises `IngestError`, `QdrantError` or `SmartEmbedderError` if that is impossible.
    """
    name = target.collection
    async with AsyncClient(url, token=token, max_retries=0) as client:
        with closing(await asyncio.to_thread(open_store, target)) as store:
            patience = Patience(_PATIENCE, print_error)
            if await patience.call(store.layout) is None:
                raise QdrantError(f"there is no collection {name}")
            origin = await patience.call(store.origin)
            stored = {} if origin is None else origin.vector_space
            kinds = frozenset(KINDS) & stored.keys()
            if not kinds:
                raise QdrantError(
                    f"the collection {name} does not say in which space its vectors are"
                )
            served = (await ask_service(client, patience, kinds)).origin
    return Result(
        name, {kind: stored[kind] for kind in KINDS if kind in kinds}, served.vector_space
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 1 if an id differs, and 2 if they could not be compared."""
    parsed = _parser().parse_args(arguments)
    try:
        result = asyncio.run(check(common.read_target(parsed), parsed.url, parsed.token))
    except (IngestError, QdrantError, SmartEmbedderError) as error:
        print_error(str(error))
        return 2
    if parsed.json:
        sys.stdout.write(f"{to_json_line(asdict(result) | {'same': result.is_same})}\n")
    else:
        sys.stdout.writelines(f"{to_line(line)}\n" for line in _describe(result))
    return 0 if result.is_same else 1


def _describe(result: Result) -> Iterator[str]:
    for kind, stored in result.stored.items():
        served = result.served.get(kind)
        if served == stored:
            yield f"{kind}: the same space, {stored}"
        else:
            yield f"{kind}: another space, {served or 'none'} of the service, {stored} stored"
    if not result.is_same:
        yield f"To embed the texts again: {reembed_command(result.collection)}"


def _parser() -> argparse.ArgumentParser:
    parser = common.make_parser("check", _ABOUT)
    help_ = "the name of the collection, or an alias of it"
    parser.add_argument("collection", metavar="COLLECTION", help=help_)
    common.add_common(parser, with_collection=False)
    return parser
