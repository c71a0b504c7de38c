"""`smart-embedder ingest`: its options, what it prints, and how it stops."""

import argparse
import asyncio
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from smart_embedder_client import arguments as common
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.ingest.documents import Fields, SourceError
from smart_embedder_client.ingest.journal import JournalError
from smart_embedder_client.ingest.options import IngestError, IngestOptions, Report
from smart_embedder_client.ingest.patience import is_temporary
from smart_embedder_client.ingest.sources import encodable_name
from smart_embedder_client.ingest.start import ingest
from smart_embedder_client.qdrant.errors import QdrantBusyError, QdrantError, QdrantFullError
from smart_embedder_client.qdrant.layout import Datatype
from smart_embedder_client.terminal import plain, plain_json

_STOPS = (IngestError, JournalError, QdrantError, SmartEmbedderError, SourceError)
_AGAIN = "The same command goes on from here."
_INTERRUPTED = 130
_SHOWN_REFUSALS, _SHOWN_FAILURES = 5, 100
_MIB = 2**20
_ABOUT = """\
Split, embed and store texts in a Qdrant collection.

SOURCE is a file of JSONL, CSV, Parquet, text, Markdown or HTML, or a folder of such files. The same
command goes on after any interruption, and stores nothing twice.
"""


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit status is 0 if something was read, and everything is stored."""
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
            told = plain(str(error)).rstrip(".")
            sys.stderr.write(f"{told}. {_AGAIN}\n" if _goes_on(error) else f"{told}.\n")
            return 1
        except KeyboardInterrupt:
            sys.stderr.write(f"Interrupted. {_AGAIN}\n")
            sys.stderr.flush()
            # Threads may wait a minute or more for Qdrant or the service, and an ordinary exit for
            # them. What is stored and noted survives a kill at any moment.
            os._exit(_INTERRUPTED)
    if parsed.json:
        sys.stdout.write(f"{plain_json(asdict(report))}\n")
    else:
        sys.stdout.writelines(f"{plain(line)}\n" for line in _told(report, sync=parsed.sync))
    if not report.documents:
        sys.stderr.write(f"Nothing was read: {plain(str(parsed.source))} has no text.\n")
    return 0 if report.is_complete else 1


def _goes_on(error: Exception) -> bool:
    """Whether the same command will do better without another option."""
    if isinstance(error, QdrantBusyError | SmartEmbedderError):
        return is_temporary(error)
    return isinstance(error, QdrantFullError)


def _told(report: Report, *, sync: bool) -> Iterator[str]:
    """The run in a few sentences."""
    there = report.points - report.uploaded - len(report.refused)
    read = f"{report.points} chunks of {report.documents} documents in {report.seconds:.0f} s"
    yield f"{read}: {report.uploaded} stored, {there} there already, {report.removed} removed"
    if report.pooled:
        yield f"{report.pooled} chunks had too many ColBERT vectors, which were pooled"
    if report.truncated:
        yield f"{report.truncated} chunks were longer than the model reads, and were cut"
    if report.stale:
        why = "nothing is removed before all is read" if sync else "--sync removes them"
        yield f"{report.stale} points are of what is gone or has changed: {why}"
    yield from (f"{source}: {reason}" for source, reason in report.refused[:_SHOWN_REFUSALS])
    if report.refused:
        yield f"{len(report.refused)} chunks were refused; the same command tries them again"
    if report.unread:
        counts = sorted(report.unread.items(), key=lambda each: (-each[1], each[0]))
        yield f"not read: {', '.join(f'{count} {ending}' for ending, count in counts)}"
    if report.failed:
        yield f"{len(report.failed)} files or folders could not be read:"
        yield from (f"  {reason}" for _, reason in report.failed[:_SHOWN_FAILURES])
    if len(report.failed) > _SHOWN_FAILURES:
        yield f"  and {len(report.failed) - _SHOWN_FAILURES} more, which --json names"


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
