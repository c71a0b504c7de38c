"""Pictures are small SVG files that show what was measured."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks.pictures import draw_engines, draw_load

SVG = "{http://www.w3.org/2000/svg}"


def read(file: Path) -> tuple[list[str], ET.Element]:
    root = ET.fromstring(file.read_text())
    assert file.stat().st_size < 100 * 1024
    return [element.text or "" for element in root.iter(f"{SVG}text")], root


def engine(name: str, rate: float | None, *, dense_only: bool = False) -> dict[str, Any]:
    speed = None if rate is None else {"texts_per_second": rate}
    return {"engine": name, "dense_only": dense_only, "speed": speed}


def test_bars_are_as_long_as_their_rates_and_the_fastest_is_first(tmp_path: Path) -> None:
    report = {
        "workload": "mixed",
        "texts": 64,
        "tokens": 9596,
        "machine": "A & B",
        "engines": [engine("slow", 2), engine("smart-embedder-int8", 8), engine("absent", None)],
    }
    file = draw_engines(report, tmp_path / "docs")
    texts, root = read(file)
    widths = [float(bar.get("width", 0)) for bar in root.iter(f"{SVG}rect")]
    assert file.name == "engines-mixed.svg"
    assert widths[0] == pytest.approx(4 * widths[1], rel=0.01)
    assert texts.index("smart-embedder-int8") < texts.index("slow")
    assert {"8.00", "2.00"} <= set(texts)
    assert "absent" not in texts


def test_engines_with_dense_vectors_only_are_marked(tmp_path: Path) -> None:
    engines = [engine("half", 3, dense_only=True)]
    report = {"workload": "x", "texts": 1, "tokens": 9, "machine": "", "engines": engines}
    texts, _ = read(draw_engines(report, tmp_path))
    assert "half*" in texts
    assert any(text.startswith("* dense vectors only") for text in texts)


def run(clients: int, p50: float, p99: float) -> dict[str, Any]:
    row = {"Scenario": "embed_full", "OK": 9, "Conc": clients, "P50": p50, "P99": p99, "Req/s": 5.0}
    return {"scenarios": [row, row | {"Scenario": "rerank", "P99": 1e9}]}


def test_latencies_rise_with_the_clients_from_left_to_right(tmp_path: Path) -> None:
    file = draw_load([run(8, 40, 90), run(1, 10, 20)], "embed_full", tmp_path)
    texts, root = read(file)
    lines = [line.get("points", "") for line in root.iter(f"{SVG}polyline")]
    (x1, y1), (x8, y8) = (map(float, point.split(",")) for point in lines[-1].split())
    assert x1 < x8
    assert y1 > y8, "up is slow"
    assert texts.index("1") < texts.index("8")
    assert "90" in texts, "the scale ends at the highest latency"


def test_a_scenario_that_was_not_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no run has a successful request of search"):
        draw_load([run(1, 1, 2)], "search", tmp_path)
