"""`python -m app` starts the service; `python -m app --help` lists the flags."""

import signal
import sys

from app.run import delay_garbage_collection
from app.settings import parse_flags
from smart_embedder.startup import link_ahead


def main() -> None:
    """Serve with the settings that the command line gives."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & {*arguments}:
        parse_flags(["--help"])  # Exits before the slow imports.
    # Until the server sets its handlers: Ctrl+C during the imports would print a traceback.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    delay_garbage_collection()  # `run` does this too, but after the imports.
    link_ahead()
    from app.main import create_app  # noqa: PLC0415 - see above
    from app.run import run  # noqa: PLC0415

    run(create_app, arguments)


if __name__ == "__main__":
    main()
