"""Pictures of what was measured: bars as an SVG file, for a light or a dark page."""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

# A label, a figure, and whether its bar stands out.
Bar = tuple[str, float, bool]

_WIDTH, _LEFT, _TOP, _STEP = 760, 250, 56, 28
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f} rect{fill:#8c959f} .ours{fill:#0969da}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3} .ours{fill:#4493f8}}"
)


def draw_bars(title: str, about: str, bars: Sequence[Bar], file: Path) -> Path:
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
