"""The report of `benchmarks.gpu.report` as a page in Markdown."""

from collections.abc import Iterable, Iterator
from typing import Any

Outcome = dict[str, Any]


def page(outcomes: list[Outcome]) -> str:
    """Tables of what was measured, then what the sections said that failed."""
    return "\n".join(_lines(outcomes)) + "\n"


def _lines(outcomes: list[Outcome]) -> Iterator[str]:
    figures = {each["name"]: each["figures"] for each in outcomes if each["figures"]}
    yield "# GPU report"
    yield from _machine(figures.get("machine", {}))
    yield from ["", "## Sections", ""]
    rows = ((each["name"], _verdict(each["status"]), each["seconds"]) for each in outcomes)
    yield from _table(("section", "result", "seconds"), rows)
    if "engines" in figures:
        yield from _engines(figures["engines"])
    if launched := figures.get("launching"):
        yield from ["", "## A query's forward, alone and beside a busy event loop", ""]
        yield from _table(launched[0], (row.values() for row in launched))
    if "http_rate" in figures:
        yield from ["", "## Over HTTP, from one process, dense vectors", ""]
        yield from _table(("figure", "value"), figures["http_rate"].items())
    for name in ("kernels embedder", "kernels reranker"):
        for size, profiled in figures.get(name, {}).items():
            yield from _kernels(name, size, profiled)
    for each in outcomes:
        if each["name"] in {"tests", "verify"} or each["status"] != 0:
            yield from ["", f"## {each['name']}", "", "```text", each["said"], "```"]


def _verdict(status: int | None) -> str:
    return {0: "ok", None: "**not finished**"}.get(status, f"**failed** ({status})")


def _machine(machine: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield from _table(("machine", ""), machine.items())


def _engines(found: dict[str, Any]) -> Iterator[str]:
    yield from ["", "## In the engine, tokens a second", ""]
    rows = (
        (
            row["tokens"],
            row["kinds"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row.get('flagembedding', 0):,.0f}",
            f"{row.get('ratio', 0):.2f}",
        )
        for row in found["rates"]
    )
    yield from _table(("tokens a text", "kinds", "this engine", "FlagEmbedding", "ratio"), rows)
    yield from ["", "## A lone query, memory, and what runs", ""]
    others = {name: value for name, value in found.items() if name != "rates"}
    yield from _table(("figure", "value"), others.items())


def _kernels(name: str, size: str, profiled: dict[str, Any]) -> Iterator[str]:
    total = profiled["microseconds"] / 1000
    yield from ["", f"## {name.capitalize()}, {size}: {profiled['tokens']} tokens", ""]
    yield f"{profiled['launches']} launches, {total:.2f} ms on the device."
    yield ""
    kernels = profiled["kernels"]
    rows = ((each["name"], each["calls"], each["microseconds"]) for each in kernels)
    yield from _table(("kernel", "calls", "microseconds"), rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    head = list(head)
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(_cell(value) for value in row) + " |"


def _cell(value: object) -> str:
    text = f"{value:,.3f}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
