"""Pictures of what was measured: bars as an SVG file, for a light or a dark page.

python -m benchmarks.pictures mixed.json --folder docs
python -m benchmarks.pictures c1.json c4.json c8.json --scenario embed_full

The first draws a file that `benchmarks.engines --json` wrote, the second files of
`benchmark.py --json`, each of another `--concurrency`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Content = Mapping[str, Any]
# A label, a figure, and whether its bar stands out.
Bar = tuple[str, float, bool]

_WIDTH, _LEFT, _TOP, _STEP = 760, 250, 56, 28
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f} rect{fill:#8c959f} .ours{fill:#0969da}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3} .ours{fill:#4493f8}}"
)


def draw(title: str, about: str, bars: Sequence[Bar], file: Path) -> Path:
    """Bars from left to right as long as their figures, in the given order."""
    height = _TOP + len(bars) * _STEP + 10
    scale = (_WIDTH - _LEFT - 90) / max(figure for _, figure, _ in bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text x="16" y="26" font-weight="600">{escape(title)}</text>',
        f'<text x="16" y="44">{escape(about)}</text>',
    ]
    for place, (label, figure, stands_out) in enumerate(bars):
        y, width = _TOP + place * _STEP, figure * scale
        size = f'x="{_LEFT}" y="{y}" width="{width:.1f}" height="20"'
        lines += [
            f'<text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(label)}</text>',
            f'<rect {size} class="{"ours" if stands_out else ""}"/>',
            f'<text x="{_LEFT + width + 6:.1f}" y="{y + 15}">{figure:.2f}</text>',
        ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([*lines, "</svg>\n"]))
    return file


def draw_engines(report: Content, folder: Path) -> Path:
    """Texts per second, the fastest first; engines that did not run are left out."""
    bars: list[Bar] = []
    for row in report["engines"]:
        if row["speed"]:
            name, rate = row["engine"], row["speed"]["texts_per_second"]
            bars.append((name + "*" * row["dense_only"], rate, name.startswith("smart-embedder")))
    title = f"Texts per second: {report['workload']}, {report['texts']} texts"
    about = f"{report['tokens']} tokens; {report['machine']}; * dense vectors only"
    file = folder / f"engines-{report['workload']}.svg"
    return draw(title, about, sorted(bars, key=lambda bar: -bar[1]), file)


def draw_load(runs: Sequence[Content], scenario: str, folder: Path) -> Path:
    """P50 and P99 of one scenario for each number of concurrent clients."""
    rows = [
        row for run in runs for row in run["scenarios"] if row["Scenario"] == scenario and row["OK"]
    ]
    if not rows:
        raise SystemExit(f"no run has a successful request of {scenario}")
    bars = [
        (f"{row['Conc']} clients, {row['Req/s']:.1f}/s: {name}", row[name], name == "P50")
        for row in sorted(rows, key=lambda row: row["Conc"])
        for name in ("P50", "P99")
    ]
    title, about = f"Latency against load: {scenario}", "milliseconds, by concurrent clients"
    return draw(title, about, bars, folder / f"load-{scenario}.svg")


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="of benchmarks.engines or benchmark.py")
    parser.add_argument("--scenario", default="embed_full", help="of benchmark.py (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="where to (%(default)s)")
    arguments = parser.parse_args()
    contents = [json.loads(file.read_text()) for file in arguments.files]
    for report in (each for each in contents if "engines" in each):
        print(draw_engines(report, arguments.folder))
    if runs := [each for each in contents if "scenarios" in each]:
        print(draw_load(runs, arguments.scenario, arguments.folder))


if __name__ == "__main__":
    main()
