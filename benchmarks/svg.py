"""The few SVG shapes that the pictures need; colours follow the reader's light or dark page."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 }
.faint { fill: #6e7781; font-size: 12px }
.bar, .dot { fill: #8c959f }
.ours { fill: #0969da }
.line { fill: none; stroke: #8c959f; stroke-width: 2 }
.line.ours { fill: none; stroke: #0969da }
.grid { stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .faint { fill: #8d96a0 }
  .ours { fill: #4493f8 }
  .line.ours { stroke: #4493f8 }
  .grid { stroke: #30363d }
}
"""


@dataclass(slots=True)
class Picture:
    """Collects shapes, in pixels from the upper left corner."""

    width: int
    height: int
    title: str
    _shapes: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line of text whose baseline is at `y`; `anchor` is start, middle or end."""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._shapes.append(f"<text {place} class={quoteattr(kind)}>{escape(text)}</text>")

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A filled rectangle."""
        size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._shapes.append(f'<rect {size} rx="2" class={quoteattr(kind)}/>')

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        """A line through the points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polyline points="{path}" class={quoteattr(kind)}/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        """A small disc."""
        self._shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class={quoteattr(kind)}/>')

    def render(self) -> str:
        """The whole file."""
        size = f'width="{self.width}" height="{self.height}"'
        box = f'viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img">'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, f"<style>{_STYLE}</style>", *self._shapes, "</svg>\n"])
