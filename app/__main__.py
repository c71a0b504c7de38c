"""`python -m app` serves; `python -m app --help` lists the flags."""

import sys

from app.settings.flags import parse_flags


def main() -> None:
    """Serve, with the settings that the command line gives."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & {*arguments}:
        parse_flags(["--help"])  # Exits; importing the service takes longer.
    from app.main import create_app  # noqa: PLC0415 - see above
    from app.server.process import run  # noqa: PLC0415

    run(create_app, arguments)


if __name__ == "__main__":
    main()
