"""Runs a tool in this process, and returns what it prints."""

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO


def run_printed(main: Callable[[list[str]], int], *arguments: str) -> tuple[int, str]:
    """Return the exit status, and everything printed."""
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()) as errors:
        status = main([*arguments])
    return status, printed.getvalue() + errors.getvalue()
