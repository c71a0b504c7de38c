"""What a tool prints, run in this process."""

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO


def run_printed(main: Callable[[list[str]], int], *arguments: str) -> tuple[int, str]:
    """Its exit status, and what it has printed."""
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()) as errors:
        status = main([*arguments])
    return status, printed.getvalue() + errors.getvalue()
