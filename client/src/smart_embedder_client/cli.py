"""The command `smart-embedder`: it fills a Qdrant collection, asks it, and checks it."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata

_COMMANDS = "smart_embedder.commands"
_USAGE = """\
usage: smart-embedder ingest SOURCE --collection NAME [options]
       smart-embedder ingest --from-collection NAME --collection NEW [options]
       smart-embedder search QUERY --collection NAME [options]
       smart-embedder check COLLECTION [options]

With --help each lists its options."""
_MODULES = {"ingest": "ingest.command", "search": "search", "check": "ingest.check"}
_EXTRA = '"smart-embedder-client[qdrant]"'


def main() -> None:
    """Run the command that the first argument names.

    The service's package has a command of the same name, which serves. Whichever of the two is
    installed last, it finds the other one's commands.
    """
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in _MODULES:
        sys.exit(_load(name)(arguments))
    serve = metadata.entry_points(group=_COMMANDS, name="serve")
    if serve:
        next(iter(serve)).load()()
    elif name in ("-h", "--help"):
        sys.stdout.write(f"{_USAGE}\n")
    else:
        sys.exit(_USAGE)


def _load(name: str) -> Callable[[Sequence[str]], int]:
    """The command, whose packages the extra `qdrant` installs."""
    try:
        command: Callable[[Sequence[str]], int] = import_module(
            f"smart_embedder_client.{_MODULES[name]}"
        ).main
    except ImportError as error:
        sys.exit(f"smart-embedder {name} needs {error.name}: pip install {_EXTRA}")
    return command
