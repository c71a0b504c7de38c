"""`smart-embedder ingest`: the options, the printed report and the exit status."""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from smart_embedder_client import arguments as common
from smart_embedder_client.arguments import to_json_line, to_line
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.ingest.from_collection import ingest_collection
from smart_embedder_client.ingest.options import IngestOptions, LoadOptions, Report
from smart_embedder_client.ingest.pace import is_temporary
from smart_embedder_client.ingest.run import ingest
from smart_embedder_client.ingest.sources import Fields, encodable_name
from smart_embedder_client.qdrant.store import (
    KINDS,
    Datatype,
    QdrantBusyError,
    QdrantError,
    QdrantFullError,
)

_STOPS = (IngestError, QdrantError, SmartEmbedderError)
_RESUME = "The same command goes on from here."
_INTERRUPTED = 130
# Options that have no effect on the chunks of a collection.
_FILE_OPTIONS = (
    *("source", "text_field", "id_field", "encoding", "chunk_tokens", "overlap", "tokenizer"),
    *("dataset", "sync", "journal", "recheck"),
)
_MAX_REFUSALS, _MAX_FAILURES = 5, 100
_ABOUT = """\
Split, embed and store texts in a Qdrant collection.

SOURCE is a file of JSON, CSV, Parquet, text, Markdown, HTML, PDF, DOCX, ODT, PPTX or RTF, or a
folder of such files. The same command resumes an interrupted run, and stores nothing twice. With
--from-collection the texts are read from another collection of the same Qdrant.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0 if documents were read and all of them are stored."""
    parsed = _parse(arguments)
    with asyncio.Runner() as runner:
        try:
            target = common.read_target(parsed)
            service = (parsed.url, parsed.token)
            if parsed.from_collection is not None:
                options = LoadOptions(**_read_options(parsed, LoadOptions))
                run = ingest_collection(options, parsed.from_collection, target, *service)
            else:
                run = ingest(_read_ingest_options(parsed), target, *service, parsed.journal)
            report = runner.run(run)
        except _STOPS as error:
            sentence = to_line(str(error)).rstrip(".")
            sys.stderr.write(
                f"{sentence}. {_RESUME}\n" if _is_resumable(error) else f"{sentence}.\n"
            )
            return 1
        except KeyboardInterrupt:
            sys.stderr.write(f"Interrupted. {_RESUME}\n")
            sys.stderr.flush()
            # An ordinary exit waits for threads, which may wait minutes for Qdrant or the service.
            # Points and journal survive a kill at any moment.
            os._exit(_INTERRUPTED)
    if parsed.json:
        sys.stdout.write(f"{to_json_line(asdict(report))}\n")
    else:
        sys.stdout.writelines(f"{to_line(line)}\n" for line in _describe(report, sync=parsed.sync))
    if not report.documents:
        source = str(parsed.source or parsed.from_collection)
        sys.stderr.write(f"Nothing was read: {to_line(source)} has no text.\n")
    return 0 if report.is_complete else 1


def _is_resumable(error: Exception) -> bool:
    """Whether the same command may succeed later, without other options."""
    if isinstance(error, QdrantBusyError | SmartEmbedderError):
        return is_temporary(error)
    return isinstance(error, QdrantFullError)


def _describe(report: Report, *, sync: bool) -> Iterator[str]:
    existing = report.points - report.uploaded - len(report.refused)
    read = f"{report.points} chunks of {report.documents} documents in {report.seconds:.0f} s"
    yield f"{read}: {report.uploaded} stored, {existing} there already, {report.removed} removed"
    if report.pooled:
        yield f"{report.pooled} chunks had too many ColBERT vectors, which were pooled"
    if report.truncated:
        yield f"{report.truncated} chunks were longer than the model reads, and were cut"
    if report.stale:
        advice = "nothing is removed before all is read" if sync else "--sync removes them"
        yield f"{report.stale} points are of sources that are gone or have changed: {advice}"
    yield from (f"{source}: {reason}" for source, reason in report.refused[:_MAX_REFUSALS])
    if report.refused:
        yield f"{len(report.refused)} chunks were refused; the same command tries them again"
    if report.unread:
        counts = sorted(report.unread.items(), key=lambda item: (-item[1], item[0]))
        yield f"not read: {', '.join(f'{count} {suffix}' for suffix, count in counts)}"
    if report.failed:
        yield f"{len(report.failed)} files or folders could not be read:"
        yield from (f"  {reason}" for _, reason in report.failed[:_MAX_FAILURES])
    if len(report.failed) > _MAX_FAILURES:
        yield f"  and {len(report.failed) - _MAX_FAILURES} more, which --json names"


def _read_options(parsed: argparse.Namespace, kind: type[LoadOptions]) -> dict[str, Any]:
    names = {option.name for option in fields(kind)}
    return {name: value for name, value in vars(parsed).items() if name in names}


def _read_ingest_options(parsed: argparse.Namespace) -> IngestOptions:
    options = _read_options(parsed, IngestOptions)
    options["dataset"] = encodable_name(parsed.dataset or parsed.source.resolve().name)
    options["fields"] = Fields(parsed.text_field, parsed.id_field, parsed.encoding)
    return IngestOptions(**options)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options; exit if they contradict each other."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.from_collection is None:
        if parsed.source is None:
            parser.error("the following arguments are required: SOURCE, or --from-collection")
        return parsed
    for name in _FILE_OPTIONS:
        if getattr(parsed, name) != parser.get_default(name):
            option = "SOURCE" if name == "source" else f"--{name.replace('_', '-')}"
            parser.error(
                "--from-collection takes the chunks that the collection has: leave out " + option
            )
    return parsed


def _check_encoding(name: str) -> str:
    try:
        "a".encode(name)
    except (LookupError, UnicodeError) as error:
        raise argparse.ArgumentTypeError(f"{name} is no encoding that Python knows") from error
    return name


def _parser() -> argparse.ArgumentParser:
    parser = common.make_parser("ingest", _ABOUT)
    help_ = "a file or a folder"
    parser.add_argument("source", type=Path, nargs="?", metavar="SOURCE", help=help_)
    help_ = "instead of SOURCE: embed the texts of this collection of the same Qdrant"
    parser.add_argument("--from-collection", metavar="NAME", help=help_)
    common.add_common(parser)
    number: dict[str, Any] = {"type": common.positive, "metavar": "N"}
    add = parser.add_argument_group("texts").add_argument
    help_ = "the field that is embedded (%(default)s)"
    add("--text-field", default="text", metavar="NAME", help=help_)
    help_ = "the field that identifies a row; without it, the text does"
    add("--id-field", metavar="NAME", help=help_)
    help_ = "the encoding of texts, CSV and JSON that are not UTF-8 or UTF-16, such as cp1252"
    add("--encoding", type=_check_encoding, metavar="NAME", help=help_)
    add("--chunk-tokens", **number, default=512, help="maximum tokens of a chunk (%(default)s)")
    help_ = "tokens that a chunk repeats of the one before (%(default)s)"
    add("--overlap", type=common.not_negative, default=64, metavar="N", help=help_)
    help_ = "the model's tokenizer.json; without it the service counts tokens"
    add("--tokenizer", type=Path, metavar="FILE", help=help_)
    add = parser.add_argument_group("vectors").add_argument
    help_ = f"the kinds of vectors ({','.join(KINDS)})"
    add("--kinds", type=common.kinds, default=frozenset(KINDS), metavar="LIST", help=help_)
    help_ = "the number type of dense and ColBERT vectors in the collection (float32)"
    add("--datatype", choices=get_args(Datatype), help=help_)
    help_ = "the number of similar ColBERT vectors that are pooled into one"
    add("--colbert-pool-factor", **number, help=help_)
    add = parser.add_argument_group("the run").add_argument
    help_ = "the name of this set of points (that of the file or folder)"
    add("--dataset", metavar="NAME", help=help_)
    help_ = "remove points whose sources are gone or have changed"
    add("--sync", action="store_true", help=help_)
    help_ = "requests to the service at a time (%(default)s)"
    add("--requests", **number, default=4, help=help_)
    add("--streams", **number, default=4, help="uploads at a time (%(default)s)")
    help_ = "how long the service or Qdrant may be away (%(default)g)"
    add("--patience", type=float, default=300.0, metavar="SECONDS", help=help_)
    help_ = "build the HNSW graph at the end, if there is none (the default)"
    add("--index", action=argparse.BooleanOptionalAction, default=True, help=help_)
    add("--journal", type=Path, metavar="FILE", help="the file that lists stored documents")
    help_ = "ask Qdrant for every point, whatever the journal says"
    add("--recheck", action="store_true", help=help_)
    return parser
