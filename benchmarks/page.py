"""Write the tables of docs/throughput.md from figures of `benchmarks.engines`.

In the page, only text between `<!-- figures: NAME -->` and `<!-- /figures -->` is replaced.
"""

import re
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.adapters import Setting
from benchmarks.comparison import Outcome
from benchmarks.workload import WORKLOADS
from tools.table import markdown

_PLACE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
PRECISIONS = ("bfloat16", "int8", "float32")
Figures = dict[str, Any]
# Pairs of engines: the speed of the first is divided by that of the second.
_RATIOS = [
    *((f"smart-embedder-{kind}", "flagembedding") for kind in PRECISIONS),
    *((f"smart-embedder-{kind}", f"openvino-{kind}") for kind in PRECISIONS),
    *(
        ("smart-embedder-float32", peer)
        for peer in ("m3serve", "sentence-transformers-float32", "infinity-float32")
    ),
]


def with_tables(page: str, figures: Figures) -> str:
    """Replace the tables of the page."""
    return _PLACE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]](figures)}\n\n{found[3]}", page)


def outcomes_of(figures: Figures, limit: str = "") -> dict[str, Outcome]:
    """Return the measured engines of an instruction limit by name."""
    known = figures["engines"].get(limit or figures["machine"]["instructions"], {})
    outcomes = {name: Outcome(**fields) for name, fields in known.items()}
    return {name: outcome for name, outcome in outcomes.items() if outcome.measured}


def headline(figures: Figures) -> str:
    """Describe this engine's speed on this processor in a sentence."""
    outcomes, (count, tokens, _) = outcomes_of(figures), figures["texts"]["mixed"]
    parts = []
    for precision in PRECISIONS:
        if ours := outcomes.get(f"smart-embedder-{precision}"):
            alone = median(figures, ours, "one-query")
            query = f", and a query alone takes {1000 * alone:.1f} ms" if alone else ""
            parts.append(f"in {precision} {count / ours.median('mixed'):.2f} texts a second{query}")
    machine = figures["machine"]
    processor = f"**{machine['processor']}, {machine['cores']}**, `{machine['instructions']}`:"
    work = f"dense, sparse and ColBERT vectors of bge-m3 of texts of {tokens / count:.0f} tokens"
    return "\n".join(
        [f"{processor} {work} on average:", *(f"{part};" for part in parts[:-1]), f"{parts[-1]}."]
    )


def about(figures: Figures) -> str:
    """Describe the date and the versions of the figures."""
    machine, versions = figures["machine"], {"PyTorch": figures["versions"]["torch"]}
    for outcome in outcomes_of(figures).values():
        if outcome.version:
            versions[outcome.contender.adapter.replace("_", "-")] = outcome.version
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    run = f"{figures['date']}, commit {figures['commit']}, {machine['system']}"
    return f"Measured on {run}, with {packages}."


def median(figures: Figures, outcome: Outcome, workload: str) -> float | None:
    """Return the median seconds per text; None if the engine did not have the workload."""
    if workload not in outcome.rounds:
        return None
    if not WORKLOADS[workload].one_at_a_time:
        return outcome.median(workload) / int(figures["texts"][workload][0])
    return statistics.median(call for seconds in outcome.rounds[workload] for call in seconds)


def speed(figures: Figures, *, in_full: bool = True) -> str:
    """Format a row of absolute figures for each engine, and the reason why an engine has none.

    `in_full` adds settings, rounds and the lowest cosines.
    """
    is_latency = {name: WORKLOADS[name].one_at_a_time for name in figures["texts"]}
    heads = [f"{name}, {'ms' if latency else 'texts/s'}" for name, latency in is_latency.items()]
    rows = []
    for outcome in outcomes_of(figures).values():
        cells = [outcome.name + (", dense only" if outcome.contender.dense_only else "")]
        if in_full:
            cells += [str(Setting(**next(iter(outcome.settings.values())))), str(outcome.turns)]
        for name, latency in is_latency.items():
            seconds = median(figures, outcome, name)
            if seconds is None:
                cells.append("")
            else:
                cells.append(f"{1000 * seconds:.1f}" if latency else f"{1 / seconds:.2f}")
        cells.append(f"{outcome.peak_bytes / 2**20:,.0f}")
        for name in [*figures["texts"]][:2] if in_full else []:
            cosine = outcome.cosines.get(name, {}).get("dense")
            cells.append("" if cosine is None else f"{cosine:.6f}")
        rows.append(cells)
    known = figures["engines"].get(figures["machine"]["instructions"], {})
    failed = [
        f"- {name} did not run: {fields['failure']}"
        for name, fields in known.items()
        if fields["failure"]
    ]
    heads = ["engine", *(["setting", "rounds"] if in_full else []), *heads, "peak MiB"]
    heads += [f"{name}, cosine" for name in [*figures["texts"]][:2]] if in_full else []
    table = markdown(heads, rows)
    return "\n".join([table, *([""] if failed else []), *failed])


def ratios(figures: Figures) -> str:
    """Format the speed of this engine divided by each peer's, for each instruction limit."""
    rows = []
    for limit in figures["engines"]:
        outcomes = outcomes_of(figures, limit)
        for ours, theirs in _RATIOS:
            if not (ours in outcomes and theirs in outcomes):
                continue
            cells = []
            for workload in figures["texts"]:
                one, other = (median(figures, outcomes[name], workload) for name in (ours, theirs))
                ratio = other / one if one and other else 0
                cells.append(
                    "" if not ratio else f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**"
                )
            rows.append([ours.removeprefix("smart-embedder-"), theirs, limit, *cells])
    return markdown(["this engine", "divided by", "instructions", *figures["texts"]], rows)


def start(figures: Figures) -> str:
    """Format the median seconds and the highest peak memory of each number format."""
    rows = []
    for precision, runs in figures["start"].items():
        seconds, peaks = zip(*runs, strict=True)
        rows.append([precision, f"{statistics.median(seconds):.2f}", f"{max(peaks):,}"])
    return markdown(["a service with bge-m3's shape alone", "seconds to ready", "peak MiB"], rows)


def load(figures: Figures) -> str:
    """Format the rate of each scenario by the number of clients."""
    rates: dict[str, dict[int, float]] = {}
    for row in figures["load"]:
        rates.setdefault(row["Scenario"], {})[row["Conc"]] = row["Req/s"]
    counts = sorted({row["Conc"] for row in figures["load"]})
    rows = [[name, *(f"{by[count]:.0f}" for count in counts)] for name, by in rates.items()]
    return markdown(["requests/s of clients:", *map(str, counts)], rows)


def neighbours(figures: Figures) -> str:
    """Format how much longer one text takes beside each load."""
    heads, rows = figures["neighbours"]
    columns = [i for i, head in enumerate(heads) if head == "beside" or "quiet" in head]
    return markdown(
        [heads[column] for column in columns],
        [[row[column] for column in columns] for row in rows if row[0] != "nothing"],
    )


TABLES: dict[str, Callable[[Figures], str]] = {
    "headline": headline,
    "about": about,
    "speed": partial(speed, in_full=False),
    "ratios": ratios,
    "start": start,
    "neighbours": neighbours,
    "load": load,
}
