"""Tables and the page of figures."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks import engines as engines_module
from benchmarks import page
from benchmarks.comparison import Outcome

SETTINGS = {"mixed": {"batch": 4, "hint": ""}}


def outcome(name: str, *rounds: float, failure: str = "") -> Outcome:
    return Outcome(name, "1.0", SETTINGS, {"mixed": [[s] for s in rounds]}, 3 << 20, {}, failure)


def cells(table: str, column: int = 0) -> dict[str, list[str]]:
    """The other cells of each line, by the cell in `column`."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {row[column]: row[:column] + row[column + 1 :] for row in rows if row}


@pytest.fixture
def figures() -> dict[str, Any]:
    machine = {"processor": "P", "cores": "2 cores", "system": "Linux", "instructions": "avx9"}
    engines = [outcome("smart-embedder-int8", 3, 2), outcome("openvino-int8", 1, 1)]
    limited = [outcome("smart-embedder-int8", 2), outcome("openvino-int8", 3)]
    by_limit = {"avx9": [*engines, outcome("m3serve", failure="no memory")], "avx2": limited}
    return {
        "machine": machine | {"code": "abc"},
        "texts": {"mixed": [10, 100, 30]},
        "date": "2026-01-01",
        "commit": "def",
        "versions": {"torch": "2"},
        "engines": {
            limit: {outcome.name: asdict(outcome) for outcome in outcomes}
            for limit, outcomes in by_limit.items()
        },
        "start": {"int8": [[3, 1000], [1, 1400], [2, 900]]},
        "neighbours": [["beside", "ms", "P50 to quiet"], [["nothing", 2, 1], ["bulk", 3, 1.5]]],
        "load": [
            {"Scenario": "embed_full", "Conc": n, "Req/s": 5.0, "P50": 1.0, "P99": 2.0}
            for n in (8, 1)
        ],
    }


def test_the_tables_of_a_page_are_replaced_and_ratios_below_1_are_bold(figures) -> None:
    old = "".join(
        f"{name}\n<!-- figures: {name} -->\nold\n<!-- /figures -->\n" for name in page.TABLES
    )
    written = page.with_tables(old, figures)
    assert "old" not in written
    assert page.with_tables(written, figures) == written
    assert cells(page.speed(figures))["smart-embedder-int8"] == ["batch 4", "2", "4.00", "3", ""]
    assert page.speed(figures).endswith("\n\n- m3serve did not run: no memory")
    assert cells(page.ratios(figures), 2) == {
        "avx9": ["int8", "openvino-int8", "**0.40**"],
        "avx2": ["int8", "openvino-int8", "1.50"],
    }
    assert cells(page.start(figures))["int8"] == ["2.00", "1,400"]
    assert cells(page.load(figures)) == {"embed_full": ["5", "5"]}
    assert cells(page.neighbours(figures)) == {"bulk": ["1.5"]}
    assert cells(page.TABLES["speed"](figures))["smart-embedder-int8"] == ["4.00", "3"]


def test_figures_of_other_code_or_another_machine_are_not_reused(figures) -> None:
    machine, texts = figures["machine"], figures["texts"]
    assert engines_module.reuse_figures(machine, texts, figures) is figures
    assert engines_module.reuse_figures(machine | {"code": "xyz"}, texts, figures)["engines"] == {}
    assert engines_module.describe_machine().keys() == machine.keys()


def test_the_page_has_the_saved_figures() -> None:
    if engines_module.FIGURES.exists():
        written, saved = (
            engines_module.PAGE.read_text("utf-8"),
            json.loads(engines_module.FIGURES.read_text()),
        )
        assert page.with_tables(written, saved) == written, (
            "run python -m benchmarks.engines --page"
        )
