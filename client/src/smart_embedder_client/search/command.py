"""`smart-embedder search`: its options, what it prints, and how it stops."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing
from typing import get_args

from smart_embedder_client import arguments as common
from smart_embedder_client.client import Client
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.qdrant.errors import QdrantError
from smart_embedder_client.qdrant.open_store import open_store
from smart_embedder_client.qdrant.store import Depths
from smart_embedder_client.search.explain import explain
from smart_embedder_client.search.show import as_json, as_text
from smart_embedder_client.search.stages import Rescore, find
from smart_embedder_client.terminal import plain

_ABOUT = """\
Search a collection that `smart-embedder ingest` has made.

Dense and sparse vectors find candidates, reciprocal rank fusion joins them, and ColBERT vectors or
the service's reranker order the best. Each score is followed by the rank in its stage.
"""


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit status is 0 if the question was answered."""
    parsed = _parser().parse_args(arguments)
    warnings.filterwarnings("ignore", category=UserWarning, module="smart_embedder_client")
    try:
        _search(parsed)
    except (QdrantError, SmartEmbedderError) as error:
        sys.stderr.write(f"{plain(str(error))}\n")
        return 1
    return 0


def _search(parsed: argparse.Namespace) -> None:
    depths = Depths(parsed.candidates, max(parsed.fused, parsed.limit), parsed.limit)
    with (
        Client(parsed.url, token=parsed.token) as client,
        closing(open_store(common.read_target(parsed))) as store,
    ):
        found = find(client, store, parsed.query, depths, parsed.rescore)
        texts = [each.text for each in found]
        explained = explain(client, parsed.query, texts) if parsed.explain else None
    if parsed.json:
        sys.stdout.write(f"{as_json(parsed.query, found, explained)}\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in as_text(found, explained))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smart-embedder search",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("query", metavar="QUERY", help="a question, or some words")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--explain", action="store_true", help="show which tokens of each passage match"
    )
    common.add_common(parser)
    _add_stages(parser.add_argument_group("stages"))
    return parser


def _add_stages(stages: "argparse._ArgumentGroup") -> None:
    stages.add_argument(
        "--candidates",
        type=common.positive,
        default=100,
        metavar="N",
        help="passages found by dense and by sparse vectors each (%(default)s)",
    )
    stages.add_argument(
        "--fused",
        type=common.positive,
        default=20,
        metavar="N",
        help="passages that the last stage orders (%(default)s)",
    )
    stages.add_argument(
        "--limit",
        type=common.positive,
        default=10,
        metavar="N",
        help="passages that are printed (%(default)s)",
    )
    stages.add_argument(
        "--rescore",
        choices=get_args(Rescore),
        default="colbert",
        help="the last stage: ColBERT in Qdrant, the service's /rerank, or none (%(default)s)",
    )
