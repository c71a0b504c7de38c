"""Write the tables of docs/monitoring.md from the metrics' descriptions.

python -m scripts.metrics_docs
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from app.http_metrics import EMBEDDING_ENDPOINT, Metrics

PAGE = Path(__file__).resolve().parent.parent / "docs" / "monitoring.md"
START, END = "<!-- metrics -->\n", "\n<!-- /metrics -->"
# Metrics of the Python process, which exist only on Linux.
_PROCESS = "process_"


def tables() -> str:
    """Render a table of the metrics of each type, with labels and descriptions."""
    by_type: defaultdict[str, list[str]] = defaultdict(list)
    for type_, row in _rows():
        by_type[type_].append(row)
    return "".join(
        f"\n| {type_} | meaning |\n|---|---|\n" + "".join(rows) for type_, rows in by_type.items()
    )


def _rows() -> Iterator[tuple[str, str]]:
    """Yield the type of each metric and its row."""
    # With a model, so that its series exist with their labels.
    metrics = Metrics()
    metrics.embedding_endpoint(EMBEDDING_ENDPOINT)
    metrics.client("name")
    metrics.watch_model("model", ["ready"], lambda: "ready")
    metrics.watch_further_model("model", lambda: 0)
    families = {family.name: family for family in metrics.registry.collect()}
    for name, family in sorted(families.items()):
        if name.startswith(_PROCESS):
            continue
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        listed = f"{{{','.join(labels)}}}" if labels else ""
        yield family.type, f"| `{name}{suffix}{listed}` | {family.documentation} |\n"


def with_table(page: str) -> str:
    """Replace the tables of the page."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{tables()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
