"""Tables in Markdown with aligned columns, for the terminal and for pages."""

from collections.abc import Iterable, Sequence


def markdown(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Format a table: the first column is aligned left, the others, mostly numbers, right."""
    cells = [list(heads), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    first, *others = ["-" * width for width in widths]
    lines = [cells[0], [first, *(f"{rule[:-1]}:" for rule in others)], *cells[1:]]
    return "\n".join(
        f"| {' | '.join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])} |"
        for line in lines
    )
