"""`python -m tools.evaluate FOLDER`: how well your documents are found, in every representation.

FOLDER is a data set as BEIR has them: corpus.jsonl, queries.jsonl, qrels/*.tsv; with --mteb a task
of mteb instead. The models are those of the settings (the environment, .env), run in this process,
or those of a running service (--url). --reference runs the reference implementations beside it.
"""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from smart_embedder import __version__
from smart_embedder.engine.records import EmbeddingOptions, InputType
from smart_embedder.errors import SmartEmbedderError
from smart_embedder.settings.service import load_settings
from tools.packages import install_command
from tools.references.reference import PATIENT, ReferenceMissingError
from tools.service import ServiceError, address
from tools.table import markdown

try:
    from tools.evaluate.dataset import Dataset, DatasetError, read_beir
    from tools.evaluate.evaluation import MOST_RANKED, RRF_CONSTANT, Evaluation, Evaluator, Plan
    from tools.evaluate.quality import Difference, Quality
    from tools.evaluate.representations import (
        COLBERT,
        DENSE,
        EQUAL,
        KINDS,
        RRF_WEIGHTS,
        Representation,
        all_representations,
    )
    from tools.evaluate.sources import Made, Source, engine_source, look_at, service_source
except ModuleNotFoundError as error:
    sys.exit(f"tools.evaluate needs {error.name}, which '{install_command()}' installs")

_TYPES: tuple[InputType, ...] = ("query", "document")
_SPEEDS = {
    "documents/s": "documents_per_second",
    "tokens/s": "tokens_per_second",
    "query P50 ms": "query_p50_ms",
    "query P99 ms": "query_p99_ms",
    "pairs/s": "pairs_per_second",
    "rerank P50 ms": "rerank_p50_ms",
    "rerank P99 ms": "rerank_p99_ms",
}
_COMPARED = ("nDCG@10", "recall@100")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate", description=(__doc__ or "").partition("\n\n")[2]
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="the data set; of --mteb a snapshot of its repository")
    add("--mteb", metavar="TASK", help="a retrieval task of mteb, which must be installed")
    add("--subset", default="default", help="of the task, such as a language (%(default)s)")
    add("--split", default="test", help="the split, such as dev: reads qrels/dev.tsv (%(default)s)")
    help_ = "a query does not find the document with its own id"
    add("--ignore-identical-ids", action="store_true", help=help_)
    add(
        "--url",
        type=address,
        help="ask this running service; without it the engine runs in this process",
    )
    add("--token", help="the access token of that service")
    add("--model", help="the model of MODELS of that service which makes the vectors")
    add("--reranker", help="the model of MODELS of that service which reranks")
    add("--reference", action="store_true", help="run the reference implementations, too")
    add("--kinds", help=f"some of {','.join(KINDS)} (all that the models make)")
    add("--only", metavar="NAMES", help="compute these representations alone, separated by ;")
    add("--query-prompt", help="a text that the dense model reads before each query")
    add("--input-types", action="store_true", help="tell the models which texts are queries")
    add("--rerank", type=int, default=20, metavar="N", help="rerank the best N; 0: none (20)")
    help_ = "the representations whose best documents are reranked, separated by ; (the first)"
    add("--candidates", metavar="NAMES", help=help_)
    add("--baseline", metavar="NAME", help="what all are compared with (dense, or the first)")
    help_ = "of the scores in fused, such as dense=1,sparse=0.3,colbert=1 (all alike)"
    add("--weights", type=read_weights, default=EQUAL, help=help_)
    help_ = "of the kinds in rrf (dense=3,sparse=1,colbert=3)"
    add("--rrf-weights", type=read_weights, default=RRF_WEIGHTS, help=help_)
    help_ = "of reciprocal rank fusion, added to each rank (%(default)s)"
    add("--rrf-constant", type=int, default=RRF_CONSTANT, metavar="N", help=help_)
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    arguments = parser.parse_args(argv)
    if arguments.folder is None and arguments.mteb is None:
        parser.error("name a folder, or a task with --mteb")
    if not 0 <= arguments.rerank <= MOST_RANKED:
        parser.error(f"--rerank must be between 0 and {MOST_RANKED}")
    if (arguments.model or arguments.reranker) and not arguments.url:
        parser.error("--model and --reranker need --url: without it, name the models in settings")
    if (arguments.model or arguments.reranker) and arguments.reference:
        parser.error("--reference is of the models in settings: leave --model and --reranker out")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        parser.error(f"--json: the folder of {arguments.json} does not exist")
    if arguments.rrf_constant < 0:
        parser.error("--rrf-constant must not be negative")
    if arguments.input_types and arguments.query_prompt:
        parser.error("--input-types does not go with --query-prompt")
    return arguments


def read_weights(text: str) -> dict[str, float]:
    """The weight of each kind; one that is not named counts 1."""
    weights = dict(EQUAL)
    for each in text.split(","):
        kind, number = each.split("=")
        weights[kind.strip()] = float(number)
    if weights.keys() != EQUAL.keys() or not all(0 < each < math.inf for each in weights.values()):
        raise ValueError
    return weights


def plan_of(arguments: argparse.Namespace, made: Made) -> Plan:
    """What is evaluated; raises `DatasetError` where a name is not known or a kind not made."""
    kinds = made.kinds if arguments.kinds is None else frozenset(arguments.kinds.split(","))
    _known(kinds, made.kinds, "kind of vector that is made")
    possible = all_representations(kinds, made.dimensions, arguments.weights)
    names = {each.name for each in possible}
    only = names if arguments.only is None else set(_split(arguments.only))
    _known(only, names, "representation of these kinds")
    chosen = [each for each in possible if each.name in only]
    candidates = _split(arguments.candidates) or [chosen[0].name]
    usual = DENSE if DENSE in only else chosen[0].name
    baseline = arguments.baseline or usual
    _known({baseline, *candidates}, only, "representation that is evaluated")
    fusion = (arguments.rrf_constant, arguments.rrf_weights)
    plan = Plan(chosen, arguments.rerank, candidates, baseline, *fusion)
    if arguments.input_types or (made.reads_queries_apart and COLBERT in plan.kinds):
        if arguments.query_prompt:
            raise DatasetError(
                "--query-prompt is not for a ColBERT model, which has markers of its own: leave "
                "one of them out (--kinds dense)"
            )
        asked, stored = (EmbeddingOptions(input_type=each) for each in _TYPES)
        return replace(plan, query_options=asked, document_options=stored)
    return replace(plan, query_options=EmbeddingOptions(prompt=arguments.query_prompt or None))


def _split(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(";") if name.strip()]


def _known(names: AbstractSet[str], there: AbstractSet[str], what: str) -> None:
    unknown = sorted(names - there)
    if unknown or not names:
        raise DatasetError(f"{', '.join(unknown)!r} is no {what}: {'; '.join(sorted(there))}")


def read_dataset(arguments: argparse.Namespace) -> Dataset:
    """The data set that is named; raises `DatasetError`."""
    if arguments.mteb is None:
        rules = {"ignores_identical_ids": arguments.ignore_identical_ids}
        return read_beir(arguments.folder, arguments.split, **rules)
    try:
        from tools.evaluate.mteb_task import read_mteb  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise DatasetError(f"--mteb needs the package mteb: {error}") from None
    return read_mteb(arguments.mteb, arguments.folder, arguments.split, arguments.subset)


async def evaluate(source: Source, dataset: Dataset, plan: Plan) -> Evaluation:
    """Evaluate one source."""
    with tqdm(total=len(dataset.corpus), desc=source.name, unit="documents") as bar:
        return await Evaluator(source, dataset, plan, bar.update).run()


async def run(arguments: argparse.Namespace) -> list[Evaluation]:
    """Evaluate what the command line asks for, and report it, whatever becomes of a reference."""
    dataset, settings = read_dataset(arguments), load_settings().model_copy(update=PATIENT)
    made: AbstractAsyncContextManager[Source] = engine_source(settings)
    if arguments.url is not None:
        models = (arguments.model, arguments.reranker)
        made = service_source(arguments.url, arguments.token, *models)
    async with made as source:
        plan = plan_of(arguments, await look_at(source))
        # What a reference has, too.
        basic: list[Representation] = [each for each in plan.representations if each.basic]
        if arguments.reference and not basic:
            raise DatasetError("--reference needs dense, sparse, colbert or fused among --only")
        evaluations = [await evaluate(source, dataset, plan)]
    try:
        if arguments.reference:
            # It imports PyTorch, which the engine wants to be the first to do.
            from tools.evaluate.reference import ReferenceSource  # noqa: PLC0415

            names = {each.name for each in basic}
            plan = replace(
                plan,
                representations=basic,
                candidates=[each for each in plan.candidates if each in names] or [basic[0].name],
                baseline=plan.baseline if plan.baseline in names else basic[0].name,
            )
            evaluations.append(await evaluate(ReferenceSource(settings), dataset, plan))
    except ReferenceMissingError as error:
        print(f"--reference is left out: {error}", file=sys.stderr)
    finally:
        print_report(dataset, plan, evaluations)
        if arguments.json is not None:
            write_json(arguments, dataset, evaluations)
    return evaluations


def print_report(dataset: Dataset, plan: Plan, evaluations: Sequence[Evaluation]) -> None:
    """Quality by representation, a reference's beside ours, and how fast each source was."""
    ours, *others = evaluations
    own = "" if dataset.candidates is None else ", each with candidates of its own"
    counts = f"{len(dataset.corpus)} documents, {len(dataset.queries)} queries{own}"
    print(f"{dataset.name}: {counts}.")
    for what, number in dataset.left_out.items():
        print(f"Left out: {number} {what}.")
    heads = ["representation", "bytes", *_COMPARED, "first", "95% of nDCG@10"]
    heads.append(f"nDCG@10 against {plan.baseline}")
    heads += [f"{figure} of {each.source}" for each in others for figure in _COMPARED]
    references = [{row.representation: row.quality for row in each.rows} for each in others]
    rows = []
    for row in ours.rows:
        size = "" if row.bytes_per_document is None else f"{row.bytes_per_document:,.0f}"
        cells = [row.representation, size, *_compared(row.quality), f"{row.quality.success_1:.4f}"]
        cells += ["{:.4f} to {:.4f}".format(*row.interval), _told(row.difference)]
        for reference in references:
            cells += _compared(reference.get(row.representation))
        rows.append(cells)
    print(f"\n{markdown(heads, rows)}\n")
    compared = sum(row.difference is not None for row in ours.rows)
    print(f"By chance alone about {compared / 20:.1f} of {compared} differences would be shown.\n")
    rows = []
    for each in evaluations:
        speeds = (getattr(each.speed, name) for name in _SPEEDS.values())
        rows.append([each.source, *("" if one is None else f"{one:,.1f}" for one in speeds)])
    print(markdown(["source", *_SPEEDS], rows))


def _told(difference: Difference | None) -> str:
    """A difference as it may be read: its mean only where it is more than noise."""
    if difference is None:
        return ""
    low, high = difference.interval
    mean = f"{difference.mean:+.4f}" if difference.is_shown else "no difference shown"
    return f"{mean} ({low:+.4f} to {high:+.4f}; p {difference.p_value:.4f})"


def _compared(quality: Quality | None) -> list[str]:
    """The figures that are compared; empty cells for what a source has not."""
    if quality is None:
        return [""] * len(_COMPARED)
    return [f"{figure:.4f}" for figure in (quality.ndcg_10, quality.recall_100)]


def write_json(
    arguments: argparse.Namespace, dataset: Dataset, evaluations: Sequence[Evaluation]
) -> None:
    """The same figures, unrounded, and what they were made with."""
    given = vars(arguments).items()
    told = {
        "version": __version__,
        "dataset": dataset.name,
        "documents": len(dataset.corpus),
        "queries": len(dataset.queries),
        "left_out": dataset.left_out,
        "options": {n: str(each) for n, each in given if each is not None and n != "token"},
        "evaluations": [asdict(each) for each in evaluations],
    }
    arguments.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Evaluate, print, and return the exit status."""
    try:
        asyncio.run(run(parse()))
    except (DatasetError, ServiceError, SmartEmbedderError) as error:
        print(f"The evaluation cannot run: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
