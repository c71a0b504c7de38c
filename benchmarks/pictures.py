"""Pictures of what was measured, as SVG files.

python -m benchmarks.pictures --engines mixed.json --folder docs
python -m benchmarks.pictures --load c1.json c4.json c8.json --scenario embed_full

The first draws a file of `benchmarks.engines --json`, the second files of `benchmark.py --json`,
each of another `--concurrency`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.svg import Picture

Content = Mapping[str, Any]

_WIDTH = 760
_LEFT, _RIGHT, _TOP = 250, 90, 56
_BAR, _GAP = 20, 8
_PLOT_HEIGHT = 260
_OURS = "smart-embedder"


def draw_engines(report: Content, folder: Path) -> Path:
    """Bars of texts per second, the fastest first; engines that did not run are left out."""
    rows = [row for row in report["engines"] if row["speed"]]
    rows.sort(key=lambda row: -row["speed"]["texts_per_second"])
    title = f"Texts per second: {report['workload']}, {report['texts']} texts"
    picture = Picture(_WIDTH, _TOP + len(rows) * (_BAR + _GAP) + 30, title)
    picture.text(16, 26, title, "title")
    picture.text(16, 44, f"{report['tokens']} tokens; {report['machine']}", "faint")
    for place, row in enumerate(rows):
        _engine_bar(picture, _TOP + place * (_BAR + _GAP), row, rows[0])
    if any(row["dense_only"] for row in rows):
        picture.text(
            16, picture.height - 10, "* dense vectors only, the others all three kinds", "faint"
        )
    return _write(picture, folder / f"engines-{report['workload']}.svg")


def _engine_bar(picture: Picture, y: float, row: Content, fastest: Content) -> None:
    rate = row["speed"]["texts_per_second"]
    width = (_WIDTH - _LEFT - _RIGHT) * rate / fastest["speed"]["texts_per_second"]
    kind = "bar ours" if row["engine"].startswith(_OURS) else "bar"
    baseline = y + _BAR - 5
    picture.text(_LEFT - 10, baseline, row["engine"] + "*" * row["dense_only"], anchor="end")
    picture.bar(_LEFT, y, max(width, 1), _BAR, kind)
    picture.text(_LEFT + width + 6, baseline, f"{rate:.2f}")


def draw_load(runs: Sequence[Content], scenario: str, folder: Path) -> Path:
    """P50 and P99 of one scenario against the number of concurrent clients."""
    points = sorted(
        (
            row
            for run in runs
            for row in run["scenarios"]
            if row["Scenario"] == scenario and row["OK"]
        ),
        key=lambda row: row["Conc"],
    )
    if not points:
        raise SystemExit(f"no run has a successful request of {scenario}")
    picture = Picture(_WIDTH, _TOP + _PLOT_HEIGHT + 64, f"Latency against load: {scenario}")
    picture.text(16, 26, picture.title, "title")
    picture.text(16, 44, "milliseconds, by concurrent clients and the requests/s they got", "faint")
    highest = max(row["P99"] for row in points)
    _grid(picture, highest)
    _clients(picture, points)
    _latencies(picture, points, "P50", highest, "ours")
    _latencies(picture, points, "P99", highest, "")
    return _write(picture, folder / f"load-{scenario}.svg")


def _grid(picture: Picture, highest: float) -> None:
    for quarter in range(5):
        y = _height(highest * quarter / 4, highest)
        picture.line([(70, y), (_WIDTH - 60, y)], "grid")
        picture.text(62, y + 4, f"{highest * quarter / 4:.0f}", "faint", "end")


def _clients(picture: Picture, points: Sequence[Content]) -> None:
    for place, row in enumerate(points):
        x = _across(place, len(points))
        picture.text(x, _TOP + _PLOT_HEIGHT + 24, str(row["Conc"]), anchor="middle")
        rate = f"{row['Req/s']:.1f}/s"
        picture.text(x, _TOP + _PLOT_HEIGHT + 42, rate, "faint", "middle")


def _latencies(
    picture: Picture, points: Sequence[Content], name: str, highest: float, kind: str
) -> None:
    places = [
        (_across(place, len(points)), _height(row[name], highest))
        for place, row in enumerate(points)
    ]
    picture.line(places, f"line {kind}".strip())
    for x, y in places:
        picture.dot(x, y, f"dot {kind}".strip())
    x, y = places[-1]
    picture.text(x + 8, y + 4, name)


def _across(place: int, count: int) -> float:
    return 100 + place * (_WIDTH - 200) / max(1, count - 1)


def _height(value: float, highest: float) -> float:
    return _TOP + 10 + (_PLOT_HEIGHT - 10) * (1 - value / highest)


def _write(picture: Picture, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(picture.render())
    return file


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--load", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument(
        "--scenario",
        default="embed_full",
        help="the scenario of the runs in --load that is drawn (%(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("docs"),
        help="the folder for the pictures (%(default)s)",
    )
    arguments = parser.parse_args()
    for file in arguments.engines:
        print(draw_engines(json.loads(file.read_text()), arguments.folder))
    if arguments.load:
        runs = [json.loads(file.read_text()) for file in arguments.load]
        print(draw_load(runs, arguments.scenario, arguments.folder))


if __name__ == "__main__":
    main()
