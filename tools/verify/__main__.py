"""`python -m tools.verify`: compare vectors with the references, or with those of other servers."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.service import add_server
from tools.verify.space import CannotCompareError, check_space

_DESCRIPTION = """
Compare this engine with the reference implementations, on the models of the settings. The exit
status is 0 if all outputs are within tolerance, 1 if one is not, and 2 if the check cannot run.

With --space FILE, compare two servers instead. If FILE does not exist, the vectors of a few short
texts by the server at --url are written to it; otherwise they are compared with those in FILE. The
exit status is 0 if the vectors may be mixed, 1 if they may not, and 2 if they cannot be compared.

With --made-with, compare texts and vectors that another server made with the dense model of the
settings; if they differ, find the settings that make them. The exit status is 0 if the vectors may
be mixed, 1 if they may not, and 2 if they cannot be compared.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.verify",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("with --space")
    help_ = "a server's vectors of a few short texts, as JSON"
    group.add_argument("--space", type=Path, metavar="FILE", help=help_)
    add_server(group)
    group.add_argument("--model", help="the embedding model, if the server has several")
    group = parser.add_argument_group("with --made-with")
    help_ = "a JSON Lines file, or a collection such as http://localhost:6333/collections/docs"
    group.add_argument("--made-with", metavar="FILE|URL", help=help_)
    help_ = "the field, or the payload's key, with the text (%(default)s)"
    group.add_argument("--text-field", default="text", help=help_)
    help_ = "the field, or the vector's name, if there are several"
    group.add_argument("--vector-name", help=help_)
    options = parser.parse_args(argv)
    if options.space is None and options.made_with is None:
        # Imports PyTorch and the references, which --space does not need.
        from tools.verify import parity  # noqa: PLC0415

        return parity.check()
    try:
        if options.made_with is not None:
            # Imports PyTorch, too.
            from tools.verify import made_with  # noqa: PLC0415

            return made_with.check_made_with(
                options.made_with, options.text_field, options.vector_name
            )
        return check_space(options.space, options)
    except CannotCompareError as error:
        print(f"Nothing was compared: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
