"""`smart-embedder ingest`: its options, what it prints, and how it stops."""

import argparse
import asyncio
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from smart_embedder_client import arguments as common
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.ingest.documents import Fields, SourceError
from smart_embedder_client.ingest.journal import JournalError
from smart_embedder_client.ingest.options import IngestError, IngestOptions, Report
from smart_embedder_client.ingest.sources import encodable_name
from smart_embedder_client.ingest.start import ingest
from smart_embedder_client.qdrant.errors import QdrantError
from smart_embedder_client.qdrant.layout import Datatype

_STOPS = (IngestError, JournalError, QdrantError, SmartEmbedderError, SourceError)
_AGAIN = "The same command goes on from here."
_INTERRUPTED = 130
_SHOWN_REFUSALS = 5
_MIB = 2**20
_ABOUT = """\
Split, embed and store texts in a Qdrant collection.

SOURCE is a .jsonl, .csv, .tsv or .parquet file, a text, or a folder of text and Markdown. The same
command goes on after any interruption, and stores nothing twice.
"""


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit status is 0 if everything is stored."""
    parsed = _parser().parse_args(arguments)
    # Qdrant's engine in Python warns of its limits, which --help and the documentation tell.
    warnings.filterwarnings("ignore", category=UserWarning, module="smart_embedder_client")
    with asyncio.Runner() as runner:
        try:
            report = runner.run(
                ingest(
                    _read_options(parsed),
                    common.read_target(parsed),
                    parsed.url,
                    parsed.token,
                    parsed.journal,
                )
            )
        except _STOPS as error:
            sys.stderr.write(f"{str(error).rstrip('.')}. {_AGAIN}\n")
            return 1
        except KeyboardInterrupt:
            sys.stderr.write(f"Interrupted. {_AGAIN}\n")
            sys.stderr.flush()
            # Threads may wait a minute or more for Qdrant or the service, and an ordinary exit for
            # them. What is stored and noted survives a kill at any moment.
            os._exit(_INTERRUPTED)
    sys.stdout.write(f"{json.dumps(asdict(report)) if parsed.json else _told(report)}\n")
    return 1 if report.refused else 0


def _told(report: Report) -> str:
    """The run in a few sentences."""
    there = report.points - report.uploaded - len(report.refused)
    read = f"{report.points} chunks of {report.documents} documents in {report.seconds:.0f} s"
    lines = [f"{read}: {report.uploaded} stored, {there} there already, {report.removed} removed"]
    if report.pooled:
        lines.append(f"{report.pooled} chunks had too many ColBERT vectors, which were pooled")
    if report.truncated:
        lines.append(f"{report.truncated} chunks were longer than the model reads, and were cut")
    if report.stale:
        lines.append(
            f"{report.stale} points are of what is gone or has changed: --sync removes them"
        )
    lines += [f"{source}: {reason}" for source, reason in report.refused[:_SHOWN_REFUSALS]]
    if report.refused:
        lines.append(
            f"{len(report.refused)} chunks were refused; the same command tries them again"
        )
    return "\n".join(lines)


def _read_options(parsed: argparse.Namespace) -> IngestOptions:
    return IngestOptions(
        source=parsed.source,
        dataset=encodable_name(parsed.dataset or parsed.source.resolve().name),
        fields=Fields(parsed.text_field, parsed.id_field),
        chunk_tokens=parsed.chunk_tokens,
        overlap=parsed.overlap,
        tokenizer=parsed.tokenizer,
        kinds=parsed.kinds,
        datatype=parsed.datatype,
        colbert_pool_factor=parsed.colbert_pool_factor,
        split_for_colbert=parsed.long_colbert == "split",
        requests=parsed.requests,
        streams=parsed.streams,
        batch_bytes=parsed.batch_mib * _MIB,
        patience=parsed.patience,
        sync=parsed.sync,
        index=parsed.index,
        recheck=parsed.recheck,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smart-embedder ingest",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a file or a folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    common.add_common(parser)
    _add_texts(parser.add_argument_group("texts"))
    _add_vectors(parser.add_argument_group("vectors"))
    run = parser.add_argument_group("the run")
    _add_source(run)
    _add_limits(run)
    _add_end(run)
    return parser


def _add_texts(texts: "argparse._ArgumentGroup") -> None:
    texts.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="the field that is embedded (%(default)s)",
    )
    texts.add_argument(
        "--id-field",
        metavar="NAME",
        help="the field that names a row; without it a row is named by its text",
    )
    texts.add_argument(
        "--chunk-tokens",
        type=common.positive,
        default=512,
        metavar="N",
        help="the most tokens of a chunk (%(default)s)",
    )
    texts.add_argument(
        "--overlap",
        type=common.not_negative,
        default=64,
        metavar="N",
        help="tokens that a chunk repeats of the one before (%(default)s)",
    )
    texts.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="the model's tokenizer.json; without it the service counts tokens",
    )


def _add_vectors(vectors: "argparse._ArgumentGroup") -> None:
    vectors.add_argument(
        "--kinds",
        type=common.kinds,
        default="dense,sparse,colbert",
        metavar="LIST",
        help="the kinds of vectors (%(default)s)",
    )
    vectors.add_argument(
        "--datatype",
        choices=get_args(Datatype),
        help="the type of dense and ColBERT vectors in the collection (float32)",
    )
    vectors.add_argument(
        "--colbert-pool-factor",
        type=common.positive,
        metavar="N",
        help="how many similar ColBERT vectors become one",
    )
    vectors.add_argument(
        "--long-colbert",
        choices=("pool", "split"),
        default="pool",
        help="if a chunk has more ColBERT vectors than a point may have (1,023 of bge-m3): pool "
        "them, or make all chunks shorter (%(default)s)",
    )


def _add_source(run: "argparse._ArgumentGroup") -> None:
    run.add_argument(
        "--dataset",
        metavar="NAME",
        help="the name of this set of points (that of the file or folder)",
    )
    run.add_argument(
        "--sync", action="store_true", help="remove points whose sources are gone or have changed"
    )


def _add_limits(run: "argparse._ArgumentGroup") -> None:
    run.add_argument(
        "--requests",
        type=common.positive,
        default=4,
        metavar="N",
        help="requests to the service at a time (%(default)s)",
    )
    run.add_argument(
        "--streams",
        type=common.positive,
        default=4,
        metavar="N",
        help="uploads at a time (%(default)s)",
    )
    run.add_argument(
        "--batch-mib",
        type=common.positive,
        default=16,
        metavar="MIB",
        help="the size of an upload in MiB (%(default)s); Qdrant takes 32 as JSON",
    )
    run.add_argument(
        "--patience",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long the service or Qdrant may be away (%(default)g)",
    )


def _add_end(run: "argparse._ArgumentGroup") -> None:
    run.add_argument(
        "--index",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make the HNSW graph at the end, if there is none (the default)",
    )
    run.add_argument(
        "--journal", type=Path, metavar="FILE", help="the file that notes what is stored"
    )
    run.add_argument(
        "--recheck",
        action="store_true",
        help="ask Qdrant for every point, whatever the journal says",
    )
