"""`smart-embedder check`: whether the service still makes the vectors that a collection has."""

import argparse
import asyncio
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from smart_embedder_client import arguments as common
from smart_embedder_client.arguments import plain, plain_json
from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.errors import SmartEmbedderError, what_differs
from smart_embedder_client.ingest.collection import ask_service
from smart_embedder_client.ingest.drift import Comparison, Drift
from smart_embedder_client.ingest.options import IngestError
from smart_embedder_client.ingest.pace import Patience, Progress
from smart_embedder_client.qdrant.store import KINDS, Origin, QdrantError, Target, open_store

_PATIENCE = 60.0
_ABOUT = """\
Embed some texts of a collection anew, and compare the vectors with those that it has.

The exit status is 0 if they are the same, 1 if a text has other vectors, and 2 if they could not be
compared.
"""


@dataclass(frozen=True, slots=True)
class Result:
    """What was found.

    Attributes:
        collection: Its name.
        points: How many it has.
        noted: In which spaces it says that its vectors are; None if it does not say.
        difference: What the service says of its own space, if that is another one.
        drifts: How far the vectors are apart, for each kind.
    """

    collection: str
    points: int
    noted: Origin | None
    difference: str | None
    drifts: Mapping[str, Drift]


async def check(
    target: Target, url: str, token: str | None, sample: int, tolerance: float | None = None
) -> Result:
    """Compare so many points of a collection.

    Raises `IngestError`, `QdrantError` or `SmartEmbedderError` if they cannot be compared.
    """
    async with AsyncClient(url, token=token, max_retries=0) as client:
        opened = await asyncio.to_thread(open_store, target)
        with closing(opened) as store, Progress(target.collection, "chunks") as progress:
            patience = Patience(_PATIENCE, progress.note)
            layout = await patience.ask(store.layout)
            kinds = frozenset(KINDS) & (layout.kinds if layout else frozenset())
            if layout is None or not kinds:
                raise QdrantError(f"there is no collection {target.collection} with such vectors")
            noted, difference = await patience.ask(store.origin), None
            try:
                served = await ask_service(client, patience, kinds, noted)
            except SmartEmbedderError as error:
                difference = what_differs(error)
                if difference is None:
                    raise
                served = await ask_service(client, patience, kinds)
            precisions = [each.precision if each else {} for each in (noted, served.origin)]
            points = await patience.ask(store.count, None)
            progress.expect(min(sample, points))
            comparison = Comparison(
                client,
                store,
                patience,
                layout.datatype or "float32",
                precisions,
                tolerance,
                progress.read,
            )
            drifts = await comparison.run(kinds, sample)
    if not drifts:
        raise QdrantError(f"no point of the collection {target.collection} has a text and vectors")
    return Result(target.collection, points, noted, difference, drifts)


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit status is 1 if a text has other vectors, 2 if they were not compared."""
    parsed = _parser().parse_args(arguments)
    warnings.filterwarnings("ignore", category=UserWarning, module="smart_embedder_client")
    target = common.read_target(parsed)
    try:
        result = asyncio.run(
            check(target, parsed.url, parsed.token, parsed.sample, parsed.tolerance)
        )
    except (IngestError, QdrantError, SmartEmbedderError) as error:
        sys.stderr.write(f"{plain(str(error))}\n")
        return 2
    if parsed.json:
        sys.stdout.write(f"{plain_json(_as_json(result))}\n")
    else:
        sys.stdout.writelines(f"{plain(line)}\n" for line in _told(result))
    return int(any(drift.drifted for drift in result.drifts.values()))


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "collection": result.collection,
        "points": result.points,
        "vector_space": result.noted and result.noted.vector_space,
        "difference": result.difference,
        "drift": {kind: drift.as_dict() for kind, drift in result.drifts.items()},
    }


def _told(result: Result) -> Iterator[str]:
    """It in a few sentences."""
    if result.noted is None:
        yield "The collection does not say in which space its vectors are."
    elif result.difference is not None:
        yield f"The service's vectors are of another space: {result.difference}"
    for kind, drift in result.drifts.items():
        yield f"{kind}: {drift}"
    if any(drift.drifted for drift in result.drifts.values()):
        name = result.collection
        yield f"To embed all texts anew: smart-embedder ingest --migrate --collection {name}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smart-embedder check",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("collection", metavar="COLLECTION", help="its name, or an alias of it")
    number: dict[str, Any] = {"type": common.positive, "metavar": "N"}
    help_ = "how many points are compared (%(default)s)"
    parser.add_argument("--sample", **number, default=100, help=help_)
    help_ = (
        "how far below 1 a cosine may be (by the numbers that vectors are computed and stored in: "
        "0.0002 for float32, 0.005 for bfloat16, 0.01 for int8)"
    )
    parser.add_argument("--tolerance", type=float, metavar="X", help=help_)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    common.add_common(parser, with_collection=False)
    return parser
