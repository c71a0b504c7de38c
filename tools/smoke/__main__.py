"""`python -m tools.smoke --url URL --token TOKEN`: does a running server answer as documented?

Sends a few dozen small requests, prints a line for each check and then how many passed, and exits
with 1 where one failed. Where the rate limit refuses a request, it waits as long as that says. It
knows only what a client can see, and changes nothing.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import httpx2
from pydantic import ValidationError

from tools.service import ServiceError, add_server, first_problem
from tools.smoke.checks import CHECKS
from tools.smoke.target import CheckFailedError, Skip, Target

# What a check raises where there is no answer, or where one has another shape than the contract's.
_NO_ANSWER = (httpx2.HTTPError, OSError)
_WRONG_SHAPE = (LookupError, TypeError, ValueError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the server that the arguments name; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.smoke",
        description="Check that a running server answers as its documentation says.",
    )
    add_server(parser)
    options = parser.parse_args(arguments)
    target = Target(options.url, options.token, options.timeout)
    try:
        target.identify()
        return check(target)
    except ServiceError as error:
        print(f"Nothing was checked: {error}", file=sys.stderr)
        return 1
    finally:
        target.close()


def check(target: Target) -> int:
    """Run and print every check; 1 where one failed."""
    print(f"Smart Embedder {target.health['version']} at {target.url}: {target.access}")
    outcomes: Counter[str] = Counter()
    for each in CHECKS:
        outcome, why = _outcome(each, target)
        outcomes[outcome] += 1
        what = (each.__doc__ or each.__name__).rstrip(".")
        print(f"{outcome:8}{what}{f' ({why})' if why else ''}", flush=True)
    passed, failed, skipped = outcomes["ok"], outcomes["FAILED"], outcomes["skipped"]
    if target.waited:
        print(f"\nThe rate limit made this wait for {target.waited} seconds.")
    print(f"\n{passed} of {passed + failed} passed, {skipped} skipped.")
    return 1 if failed else 0


def _outcome(each: Callable[[Target], None], target: Target) -> tuple[str, str]:
    """`ok`, `FAILED` or `skipped`, and why."""
    try:
        each(target)
    except Skip as reason:
        return "skipped", str(reason)
    except CheckFailedError as failure:
        return "FAILED", str(failure)
    except _NO_ANSWER as error:
        return "FAILED", f"expected an answer, saw {type(error).__name__}: {error}"
    except ValidationError as error:
        return "FAILED", f"expected the contract's shape, saw {first_problem(error)}"
    except _WRONG_SHAPE as error:
        return "FAILED", f"expected the contract's shape, saw {type(error).__name__}: {error}"
    return "ok", ""


if __name__ == "__main__":
    sys.exit(main())
