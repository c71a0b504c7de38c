"""The rows as a table for people: Markdown, so that it can be pasted into a page."""

from collections.abc import Sequence

from benchmarks.figures import Row, Speed

_COLUMNS = (
    "engine",
    "setting",
    "texts/s",
    "tokens/s",
    "ratio",
    "of ceiling",
    "peak MiB",
    "dense cosine",
    "ColBERT cosine",
)
_LATENCIES = ("P50 ms", "P99 ms")
_ROUNDS = ("rounds, seconds",)


def format_table(rows: Sequence[Row], *, latencies: bool = False) -> str:
    """One line for each row; with `latencies`, those of single calls too."""
    header = [*_COLUMNS, *(_LATENCIES if latencies else ()), *_ROUNDS]
    lines = [header, *(_cells(row, latencies=latencies) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = ("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    reasons = [f"- {row.engine} did not run: {row.failure}" for row in rows if row.speed is None]
    return "\n".join([first, rule, *others, "", *reasons]).rstrip()


def _cells(row: Row, *, latencies: bool) -> list[str]:
    name = row.engine + (", dense only" if row.dense_only else "")
    if row.speed is None:
        empty = ["-"] * (len(_COLUMNS) - 2 + len(_LATENCIES) * latencies)
        return [name, row.setting, *empty, "did not run"]
    return [name, row.setting, *_speed(row.speed, latencies=latencies)]


def _speed(speed: Speed, *, latencies: bool) -> list[str]:
    times = [f"{speed.p50_ms:.1f}", f"{speed.p99_ms:.1f}"] if latencies else []
    return [
        f"{speed.texts_per_second:.2f}",
        f"{speed.tokens_per_second:.0f}",
        _optional(speed.ratio, ".2f"),
        _optional(speed.share, ".0%"),
        f"{speed.peak_mib:.0f}",
        _optional(speed.dense, ".6f"),
        _optional(speed.colbert, ".6f"),
        *times,
        ", ".join(f"{seconds:.2f}" for seconds in speed.rounds),
    ]


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
