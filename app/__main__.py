"""`python -m app` serves; `python -m app --help` lists the flags."""

import sys

from app.process import run

if __name__ == "__main__":
    run(arguments=sys.argv[1:])
