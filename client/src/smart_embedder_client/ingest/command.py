"""`smart-embedder ingest`: its options, what it prints, and how it stops."""

import argparse
import asyncio
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from smart_embedder_client import arguments as common
from smart_embedder_client.arguments import plain, plain_json
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.ingest.from_collection import ingest_collection
from smart_embedder_client.ingest.journal import JournalError
from smart_embedder_client.ingest.options import IngestError, IngestOptions, LoadOptions, Report
from smart_embedder_client.ingest.pace import is_temporary
from smart_embedder_client.ingest.run import ingest
from smart_embedder_client.ingest.sources import Fields, SourceError, encodable_name
from smart_embedder_client.qdrant.store import (
    KINDS,
    Datatype,
    QdrantBusyError,
    QdrantError,
    QdrantFullError,
)

_STOPS = (IngestError, JournalError, QdrantError, SmartEmbedderError, SourceError)
_AGAIN = "The same command goes on from here."
_INTERRUPTED = 130
# Options of files, which say nothing about chunks that are stored already.
_OF_FILES = (
    *("source", "text_field", "id_field", "encoding", "chunk_tokens", "overlap", "tokenizer"),
    *("long_colbert", "dataset", "sync", "journal", "recheck"),
)
_SHOWN_REFUSALS, _SHOWN_FAILURES = 5, 100
_MIB = 2**20
_ABOUT = """\
Split, embed and store texts in a Qdrant collection.

SOURCE is a file of JSON, CSV, Parquet, text, Markdown, HTML, PDF, DOCX, ODT, PPTX or RTF, or a
folder of such files. The same command goes on after any interruption, and stores nothing twice.
With --from-collection the texts are those of another collection of the same Qdrant.
"""


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit status is 0 if there was something to store, and everything is stored."""
    parsed = _parse(arguments)
    # Qdrant's engine in Python warns of its limits, which --help and the documentation tell.
    warnings.filterwarnings("ignore", category=UserWarning, module="smart_embedder_client")
    with asyncio.Runner() as runner:
        try:
            target = common.read_target(parsed)
            where = (target, parsed.url, parsed.token)
            if parsed.from_collection is not None:
                options = LoadOptions(**_load_options(parsed, LoadOptions))
                report = runner.run(ingest_collection(options, parsed.from_collection, *where))
            else:
                report = runner.run(ingest(_ingest_options(parsed), *where, parsed.journal))
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
        source = str(parsed.source or parsed.from_collection)
        sys.stderr.write(f"Nothing was read: {plain(source)} has no text.\n")
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


def _load_options(parsed: argparse.Namespace, kind: type[LoadOptions]) -> dict[str, Any]:
    names = [each.name for each in fields(kind)]
    told: dict[str, Any] = {name: getattr(parsed, name, None) for name in names}
    return told | {"batch_bytes": parsed.batch_mib * _MIB}


def _ingest_options(parsed: argparse.Namespace) -> IngestOptions:
    told = _load_options(parsed, IngestOptions)
    told["dataset"] = encodable_name(parsed.dataset or parsed.source.resolve().name)
    told["fields"] = Fields(parsed.text_field, parsed.id_field, parsed.encoding)
    told["split_for_colbert"] = parsed.long_colbert == "split"
    return IngestOptions(**told)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; ends the process if they do not belong together."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.from_collection is None:
        if parsed.source is None:
            parser.error("the following arguments are required: SOURCE, or --from-collection")
        return parsed
    of_files = [name for name in _OF_FILES if getattr(parsed, name) != parser.get_default(name)]
    if of_files:
        option = of_files[0].upper() if of_files[0] == "source" else f"--{of_files[0]}"
        parser.error(
            "--from-collection takes the chunks that the collection has: leave out "
            f"{option.replace('_', '-')}"
        )
    return parsed


def _encoding(name: str) -> str:
    try:
        "a".encode(name)
    except (LookupError, UnicodeError) as error:
        raise argparse.ArgumentTypeError(f"{name} is no encoding that Python knows") from error
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smart-embedder ingest",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    help_ = "a file or a folder"
    parser.add_argument("source", type=Path, nargs="?", metavar="SOURCE", help=help_)
    help_ = "in place of SOURCE: embed the texts that this collection of the same Qdrant has"
    parser.add_argument("--from-collection", metavar="NAME", help=help_)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    common.add_common(parser)
    number: dict[str, Any] = {"type": common.positive, "metavar": "N"}
    add = parser.add_argument_group("texts").add_argument
    help_ = "the field that is embedded (%(default)s)"
    add("--text-field", default="text", metavar="NAME", help=help_)
    help_ = "the field that names a row; without it a row is named by its text"
    add("--id-field", metavar="NAME", help=help_)
    help_ = "that of texts, CSV and JSON which are not UTF-8 and have no mark, such as cp1252"
    add("--encoding", type=_encoding, metavar="NAME", help=help_)
    add("--chunk-tokens", **number, default=512, help="the most tokens of a chunk (%(default)s)")
    help_ = "tokens that a chunk repeats of the one before (%(default)s)"
    add("--overlap", type=common.not_negative, default=64, metavar="N", help=help_)
    help_ = "the model's tokenizer.json; without it the service counts tokens"
    add("--tokenizer", type=Path, metavar="FILE", help=help_)
    add = parser.add_argument_group("vectors").add_argument
    help_ = f"the kinds of vectors ({','.join(KINDS)})"
    add("--kinds", type=common.kinds, default=frozenset(KINDS), metavar="LIST", help=help_)
    help_ = "the type of dense and ColBERT vectors in the collection (float32)"
    add("--datatype", choices=get_args(Datatype), help=help_)
    help_ = "how many similar ColBERT vectors become one"
    add("--colbert-pool-factor", **number, help=help_)
    help_ = (
        "if a chunk has more ColBERT vectors than a point may have (1,023 of bge-m3): pool them, "
        "or make all chunks shorter (%(default)s)"
    )
    add("--long-colbert", choices=("pool", "split"), default="pool", help=help_)
    add = parser.add_argument_group("the run").add_argument
    help_ = "the name of this set of points (that of the file or folder)"
    add("--dataset", metavar="NAME", help=help_)
    help_ = "remove points whose sources are gone or have changed"
    add("--sync", action="store_true", help=help_)
    help_ = "requests to the service at a time (%(default)s)"
    add("--requests", **number, default=4, help=help_)
    add("--streams", **number, default=4, help="uploads at a time (%(default)s)")
    help_ = "the size of an upload in MiB (%(default)s); Qdrant takes 32 as JSON"
    add("--batch-mib", type=common.positive, default=16, metavar="MIB", help=help_)
    help_ = "how long the service or Qdrant may be away (%(default)g)"
    add("--patience", type=float, default=300.0, metavar="SECONDS", help=help_)
    help_ = "make the HNSW graph at the end, if there is none (the default)"
    add("--index", action=argparse.BooleanOptionalAction, default=True, help=help_)
    add("--journal", type=Path, metavar="FILE", help="the file that notes what is stored")
    help_ = "ask Qdrant for every point, whatever the journal says"
    add("--recheck", action="store_true", help=help_)
    return parser
