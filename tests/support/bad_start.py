"""Starts that fail: their exit status and their output."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

from tests.support.server import start_process

LIMIT = 500


def run_until_exit(
    folder: Path,
    prefix: Sequence[str] = (),
    *,
    module: str = "app",
    arguments: Sequence[str] = (),
    fresh: object = False,
    **environment: str,
) -> tuple[int, str]:
    """Run the service until it exits; return its exit status and its output."""
    with TemporaryFile("w+", encoding="utf-8") as output:
        process = start_process(
            folder,
            module,
            prefix,
            output=output,
            arguments=arguments,
            fresh=fresh,
            **environment,
        )
        try:
            status = process.wait(LIMIT)
        finally:
            process.kill()
            process.wait(LIMIT)
        output.seek(0)
        return status, output.read()
