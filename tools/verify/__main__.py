"""`python -m tools.verify`: are vectors right, and may those of two servers be mixed?"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.service import add_server
from tools.verify.space import CannotCompareError, check_space

_DESCRIPTION = """
Compare this engine with the reference implementations, on the models of the settings. The exit
status is 0 where all outputs are within tolerance, 1 where one is not, and 2 where the check cannot
run.

With --space FILE, compare two servers instead: where there is no FILE yet, write into it what the
server at --url makes of a few short texts; otherwise say whether the vectors of that server may be
mixed with those in FILE. The exit status is 0 where they may, 1 where they may not, and 2 where
they cannot be compared.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.verify",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    of_space = parser.add_argument_group("with --space")
    help_ = "what a server makes of a few short texts, as JSON"
    of_space.add_argument("--space", type=Path, metavar="FILE", help=help_)
    add_server(of_space)
    of_space.add_argument("--model", help="the name of the embedding model, if it serves several")
    options = parser.parse_args(argv)
    if options.space is None:
        # PyTorch, and the references: neither is needed to ask a server.
        from tools.verify import parity  # noqa: PLC0415

        return parity.check()
    try:
        return check_space(options.space, options)
    except CannotCompareError as error:
        print(f"Nothing was compared: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
