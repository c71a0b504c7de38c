"""`python -m app` serves; `python -m app --help` lists the flags."""

import sys
from importlib import import_module

from app.flags import parse_flags

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if {"-h", "--help"} & {*arguments}:
        parse_flags(["--help"])  # Ends the process; to import the service takes longer.
    import_module("app.process").run(arguments=arguments)
