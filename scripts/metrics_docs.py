"""Writes the table of docs/monitoring.md from the registry of the service.

python -m scripts.metrics_docs
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from app.http_metrics import EMBEDDING_ENDPOINT, Metrics

PAGE = Path(__file__).resolve().parent.parent / "docs" / "monitoring.md"
START, END = "<!-- metrics -->\n", "\n<!-- /metrics -->"
# Of the process and not of the service; on Linux alone.
_PROCESS = "process_"


def table() -> str:
    """Every metric of the service, with its labels and what it counts."""
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for kind, row in _rows():
        rows[kind].append(row)
    return "".join(
        f"\n| {kind} | meaning |\n|---|---|\n" + "".join(each) for kind, each in rows.items()
    )


def _rows() -> Iterator[tuple[str, str]]:
    """The kind of each metric, and its row."""
    # Those of a service with a model, whose series exist with their labels.
    metrics = Metrics()
    metrics.embedding_endpoint(EMBEDDING_ENDPOINT)
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
    """The page with the table in its place."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
