"""Pictures are small SVG files that show what was measured."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks.pictures import draw_engines, draw_load

SVG = "{http://www.w3.org/2000/svg}"


def read(file: Path) -> tuple[list[str], list[float]]:
    """The texts, and how long the bars are."""
    root = ET.fromstring(file.read_text())
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    return texts, [float(bar.get("width", 0)) for bar in root.iter(f"{SVG}rect")]


def engine(name: str, rate: float | None, *, dense_only: bool = False) -> dict[str, Any]:
    speed = None if rate is None else {"texts_per_second": rate}
    return {"engine": name, "dense_only": dense_only, "speed": speed}


def test_bars_are_as_long_as_their_rates_and_the_fastest_is_first(tmp_path: Path) -> None:
    engines = [engine("slow", 2, dense_only=True), engine("fast", 8), engine("absent", None)]
    about = {"workload": "mixed", "texts": 64, "tokens": 9596, "machine": "A & B"}
    file = draw_engines(about | {"engines": engines}, tmp_path / "docs")
    texts, widths = read(file)
    assert file.name == "engines-mixed.svg"
    assert widths[0] == pytest.approx(4 * widths[1], rel=0.01)
    assert texts[2:] == ["fast", "8.00", "slow*", "2.00"]


def run(clients: int, p50: float, p99: float) -> dict[str, Any]:
    row = {"Scenario": "embed_full", "OK": 9, "Conc": clients, "P50": p50, "P99": p99, "Req/s": 5.0}
    return {"scenarios": [row, row | {"Scenario": "rerank", "P99": 1e9}]}


def test_latencies_come_in_the_order_of_the_clients(tmp_path: Path) -> None:
    file = draw_load([run(8, 40, 90), run(1, 10, 20)], "embed_full", tmp_path)
    _, widths = read(file)
    assert widths == sorted(widths)
    with pytest.raises(SystemExit, match="no run has a successful request of search"):
        draw_load([run(1, 1, 2)], "search", tmp_path)
