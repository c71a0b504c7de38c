"""The command `smart-embedder`, which fills, searches and checks a Qdrant collection."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

_USAGE = """\
usage: smart-embedder ingest SOURCE --collection NAME [options]
       smart-embedder ingest --from-collection NAME --collection NEW [options]
       smart-embedder search QUERY --collection NAME [options]
       smart-embedder check COLLECTION [options]

Each command lists its options with --help."""
_MODULES = {"ingest": "ingest.command", "search": "search", "check": "check"}
_EXTRA = '"smart-embedder-client[qdrant]"'


def main() -> None:
    """Run the command that the first argument names."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in _MODULES:
        sys.exit(_load(name)(arguments))
    if name not in ("-h", "--help"):
        sys.exit(_USAGE)
    sys.stdout.write(f"{_USAGE}\n")


def _load(name: str) -> Callable[[Sequence[str]], int]:
    """Import the `main` function of a command; its packages come with the extra `qdrant`."""
    try:
        command: Callable[[Sequence[str]], int] = import_module(
            f"smart_embedder_client.{_MODULES[name]}"
        ).main
    except ImportError as error:
        sys.exit(f"smart-embedder {name} needs {error.name}: pip install {_EXTRA}")
    return command
