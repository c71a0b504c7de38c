"""Starting the service where it cannot start: the exit status and what it says."""

from collections.abc import Sequence
from pathlib import Path

from tests.support.server import start_process

LIMIT = 120
# What the hub's library says of a connection that it tries again, as it may on a busy machine.
_TRIED_AGAIN = (" thrown while requesting ", "Retrying in ")


def run_to_the_end(
    folder: Path,
    prefix: Sequence[str] = (),
    *,
    module: str = "app",
    arguments: Sequence[str] = (),
    **environment: str,
) -> tuple[int, str]:
    """Run the service until it ends by itself; return its exit status and its output."""
    process = start_process(folder, module, prefix, arguments=arguments, **environment)
    try:
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait(LIMIT)
    return process.returncode, output


def failing_start(
    folder: Path, model: Path, sentence: str, prefix: Sequence[str] = (), **environment: str
) -> str:
    """Expect status 1 and one line at least of warning, the last, with a sentence; return it."""
    status, output = run_to_the_end(folder, prefix, EMBEDDING_MODEL=str(model), **environment)
    assert status == 1, output
    assert "Traceback" not in output
    unexpected = [line for line in output.splitlines() if not _is_expected(line)]
    assert len(unexpected) == 1, output
    (line,) = unexpected
    assert sentence in line
    assert output.endswith(f"{line}\n"), output
    return line


def _is_expected(line: str) -> bool:
    return "[info " in line or any(said in line for said in _TRIED_AGAIN)
