"""`python -m tools.evaluate FOLDER`: measure how well a running service finds your documents.

FOLDER is a data set in BEIR's format: corpus.jsonl, queries.jsonl, qrels/*.tsv. Each kind of vector
is evaluated in each number format of the service.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from smart_embedder import __version__
from tools.packages import install_command
from tools.service import Service, ServiceError, add_server
from tools.table import markdown

try:
    from tools.evaluate.dataset import Dataset, DatasetError, read_beir
    from tools.evaluate.evaluation import MAX_RANKED, Plan, Row, evaluate
    from tools.evaluate.models import ATTEMPTS, RETRY_ON, Models
    from tools.evaluate.quality import Difference
    from tools.evaluate.representations import DENSE, KINDS, RRF_WEIGHTS, all_representations
except ModuleNotFoundError as error:
    sys.exit(f"tools.evaluate needs {error.name}, which '{install_command()}' installs")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate", description=(__doc__ or "").partition("\n\n")[2]
    )
    add = parser.add_argument
    add("folder", type=Path, help="the data set")
    add("--split", default="test", help="the split, such as dev: reads qrels/dev.tsv (%(default)s)")
    add_server(parser)
    add("--model", help="the embedding model of MODELS")
    add("--reranker", help="the reranker of MODELS")
    add("--only", metavar="NAMES", help="evaluate only these representations, separated by ;")
    add("--input-types", action="store_true", help="send input_type with queries and documents")
    add(
        "--rerank",
        type=int,
        default=20,
        metavar="N",
        help="rerank the best N documents of the baseline; 0: none",
    )
    help_ = "weights of the kinds in rrf (3 1 3)"
    add("--rrf-weights", nargs=3, type=float, metavar=KINDS, default=RRF_WEIGHTS, help=help_)
    help_ = "number added to each rank in reciprocal rank fusion (%(default)s)"
    add("--rrf-constant", type=int, default=0, metavar="N", help=help_)
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.rerank <= MAX_RANKED:
        parser.error(f"--rerank must be between 0 and {MAX_RANKED}")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        parser.error(f"--json: the folder of {arguments.json} does not exist")
    if arguments.rrf_constant < 0:
        parser.error("--rrf-constant must not be negative")
    return arguments


def make_plan(arguments: argparse.Namespace, models: Models) -> Plan:
    """Choose the representations; raise `DatasetError` for an unknown one in --only."""
    possible = {item.name: item for item in all_representations(models.kinds)}
    only = [name.strip() for name in (arguments.only or ";".join(possible)).split(";")]
    if unknown := sorted({*only} - possible.keys()):
        known = "; ".join(possible)
        raise DatasetError(f"{', '.join(unknown)!r} is not among the representations: {known}")
    chosen = [item for name, item in possible.items() if name in only]
    return Plan(
        chosen,
        arguments.rerank if models.reranks else 0,
        DENSE if DENSE in only else chosen[0].name,
        arguments.rrf_constant,
        dict(zip(KINDS, arguments.rrf_weights, strict=True)),
    )


def run(arguments: argparse.Namespace) -> list[Row]:
    """Evaluate as the command line says, and print and save the results."""
    dataset = read_beir(arguments.folder, arguments.split)
    service = Service(arguments.url, arguments.token, arguments.timeout, RETRY_ON, ATTEMPTS)
    with closing(service):
        service.require_ready()
        models = Models(
            service, arguments.model, arguments.reranker, input_types=arguments.input_types
        )
        plan = make_plan(arguments, models)
        rows = evaluate(models, dataset, plan)
    print_report(dataset, plan.baseline, rows)
    if arguments.json is not None:
        options = {name: str(value) for name, value in vars(arguments).items() if name != "token"}
        report = {"version": __version__, "options": options, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return rows


def print_report(dataset: Dataset, baseline: str, rows: Sequence[Row]) -> None:
    """Print a table of the representations."""
    documents, queries = len(dataset.documents), len(dataset.queries)
    print(f"{dataset.name}: {documents} documents, {queries} queries.")
    for reason, number in dataset.left_out.items():
        print(f"Left out: {number} {reason}.")
    heads = ["representation", "bytes", *rows[0].figures, "95% of nDCG@10"]
    lines = []
    for row in rows:
        size = "" if row.bytes_per_document is None else f"{row.bytes_per_document:,.0f}"
        figures = [f"{figure:.4f}" for figure in row.figures.values()]
        interval = "{:.4f} to {:.4f}".format(*row.interval)
        lines.append(
            [row.representation, size, *figures, interval, _format_difference(row.difference)]
        )
    print(f"\n{markdown([*heads, f'nDCG@10 against {baseline}'], lines)}\n")
    compared = sum(row.difference is not None for row in rows)
    print(f"By chance about {compared / 20:.1f} of {compared} differences would be shown.")


def _format_difference(difference: Difference | None) -> str:
    """Format a difference, with its mean only if it is significant."""
    if difference is None:
        return ""
    low, high = difference.interval
    mean = f"{difference.mean:+.4f}" if difference.is_shown else "no difference shown"
    return f"{mean} ({low:+.4f} to {high:+.4f}; p {difference.p_value:.4f})"


def main() -> int:
    """Evaluate, print, and return the exit status."""
    try:
        run(parse())
    except (DatasetError, ServiceError) as error:
        print(f"The evaluation cannot run: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
