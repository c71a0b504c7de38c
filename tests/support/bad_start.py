"""Starting the service where it cannot start: the exit status and what it says."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

from tests.support.server import start_process

LIMIT = 120


def run_to_the_end(
    folder: Path,
    prefix: Sequence[str] = (),
    *,
    module: str = "app",
    arguments: Sequence[str] = (),
    fresh: object = False,
    **environment: str,
) -> tuple[int, str]:
    """Run the service until it ends by itself; return its exit status and its output."""
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
