"""`python -m smart_embedder` serves; `python -m smart_embedder --help` lists the flags."""

import signal
import sys
from importlib import metadata

from smart_embedder.models.load import link_ahead
from smart_embedder.server.process import collect_rarely
from smart_embedder.settings.service import parse_flags

# The entry points of commands: the client's package adds its own.
_COMMANDS = "smart_embedder.commands"


def main() -> None:
    """Serve, with the settings that the command line gives, or run a command of the client."""
    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        for command in metadata.entry_points(group=_COMMANDS, name=arguments[0]):
            if command.name != "serve":  # That is this package's own.
                sys.exit(command.load()())
    if {"-h", "--help"} & {*arguments}:
        parse_flags(["--help"])  # Exits; importing the service takes longer.
    # Until the server has its own: Ctrl+C among the imports would print a traceback.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: sys.exit(0))
    collect_rarely()  # As `run` does, too late for the imports.
    link_ahead()
    from smart_embedder.main import create_app  # noqa: PLC0415 - see above
    from smart_embedder.server.process import run  # noqa: PLC0415

    run(create_app, arguments)


if __name__ == "__main__":
    main()
