"""`python -m tools.capacity`: how many devices and replicas a load needs for a latency.

The service's own queue and batcher are run in virtual time with what a request costs. That is
measured in a short run of the service with the settings in force (the environment, .env), or in a
running one that nobody else uses (--url), or was measured elsewhere (--times). What is not given is
asked for on a terminal.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from smart_embedder.engine.scheduling.batcher import Limits
from tools.capacity.cost import (
    Lengths,
    Load,
    PlanError,
    TimeTable,
    drawn_from,
    fit,
    parse_lengths,
    read_times,
)
from tools.capacity.measure import RERANK, Client, measure, started_service
from tools.capacity.simulation import QUEUE_PLACES, REQUESTS, Devices, Option, Target, options
from tools.service import ServiceError, address
from tools.table import markdown

_MOST_TEXTS = 1000
_QUESTIONS = {
    "rate": "Requests a second: ",
    "tokens": "Tokens of a text (30, 20:200 or 30*9,2000): ",
    "p99_ms": "Milliseconds for 99 of 100 requests: ",
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; on a terminal it asks for what is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.capacity", description=(__doc__ or "").partition("\n\n")[2]
    )
    add = parser.add_argument
    add("--rate", type=float, help="requests a second, at random times")
    add("--tokens", help="tokens of a text: 30, 20:200 (uniform), or 30*9,2000 (30 in 9 of 10)")
    add("--texts-file", type=Path, help='your texts, JSONL of {"text": ...}; needs a service')
    add("--texts", type=int, default=1, help="texts or passages of a request (%(default)s)")
    add("--kinds", default="dense,sparse,colbert", help="kinds of vectors, or rerank (%(default)s)")
    add("--p50-ms", type=float, help="milliseconds within which half of the requests are answered")
    add("--p99-ms", type=float, help="milliseconds within which 99 of 100 requests are answered")
    add("--clients", type=int, default=8, help="clients that send requests (%(default)s)")
    add("--max-queue-size", type=int, default=QUEUE_PLACES, help="MAX_QUEUE_SIZE (%(default)s)")
    add("--requests", type=int, default=REQUESTS, help="requests of each simulation (%(default)s)")
    add("--url", type=address, help="measure this service, which nobody else uses meanwhile")
    add("--token", help="the access token of that service")
    add("--times", type=Path, metavar="FILE", help="use times that --save wrote, here or elsewhere")
    add("--save", type=Path, metavar="FILE", help="write the measured times to this file")
    arguments = parser.parse_args(argv)
    for name, question in _QUESTIONS.items():
        is_given = getattr(arguments, name) is not None
        others = {"tokens": arguments.texts_file, "p99_ms": arguments.p50_ms}
        if is_given or others.get(name) is not None:
            continue
        if not sys.stdin.isatty():
            parser.error(f"--{name.replace('_', '-')} is missing")
        answer = input(question)
        try:
            setattr(arguments, name, answer if name == "tokens" else float(answer))
        except ValueError:
            parser.error(f"{answer!r} is no number")
    if arguments.save is not None and not arguments.save.parent.is_dir():
        parser.error(f"--save: the folder of {arguments.save} does not exist")
    for name in ("rate", "texts", "clients", "requests", "max_queue_size"):
        if not 0 < getattr(arguments, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    return arguments


def read_lengths(path: Path, client: Client) -> Lengths:
    """Lengths as often as texts of a file have them; raises `PlanError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines if line.strip()][:_MOST_TEXTS]
        return drawn_from([(tokens, 1.0) for tokens in map(client.count_tokens, texts)])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f'{path} is no JSONL of {{"text": ...}}: {error!r}') from None


def gather(arguments: argparse.Namespace) -> tuple[TimeTable, Load]:
    """What a request costs, and the load; measured where it is not given."""
    with ExitStack() as stack:
        client = None
        # Where times are given and no text is to be counted, no service is asked.
        if arguments.times is None or arguments.texts_file is not None:
            url, token = arguments.url, arguments.token
            if url is None:
                print("starting the service ...", file=sys.stderr)
                url, token = stack.enter_context(started_service())
            client = Client(url, arguments.kinds, token)
            stack.enter_context(closing(client))
        if arguments.texts_file is not None and client is not None:
            lengths = read_lengths(arguments.texts_file, client)
        else:
            lengths = parse_lengths(arguments.tokens)
        if arguments.times is not None:
            table = read_times(arguments.times)
        elif client is not None:
            table = measure(client, arguments.kinds)
    if arguments.save is not None:
        table.write(arguments.save)
    if table.kinds != arguments.kinds:
        raise PlanError(f"these times are of {table.kinds}, and the load is of {arguments.kinds}")
    return table, Load(arguments.rate, lengths, arguments.texts, arguments.clients)


def report(table: TimeTable, load: Load, target: Target, tried: list[list[Option]]) -> None:
    """A line for each simulation, and the answer."""
    kind = "passages" if table.kinds == RERANK else "texts"
    print(f"{load.rate:g} requests/s of {load.texts} {kind}, {table.kinds}, on {table.device}\n")
    rows = (
        (
            option.replicas,
            option.devices,
            *(f"{option.outcome.percentile(at) * 1000:.1f}" for at in (50, 99)),
            f"{option.outcome.utilisation:.0%}",
            option.outcome.refused,
        )
        for some in tried
        for option in some
    )
    heads = ("replicas", "devices of each", "P50 ms", "P99 ms", "busy", "refused")
    print(f"{markdown(heads, rows)}\n")
    wanted = [(50, target.p50), (99, target.p99)]
    told = " and ".join(f"P{at} of {most * 1000:g} ms" for at, most in wanted if most is not None)
    for some, what in zip(tried, ("Devices behind one queue", "Replicas"), strict=True):
        number = some[-1].replicas * some[-1].devices
        if some[-1].meets:
            print(f"{what} that are needed: {number}.")
        else:
            print(f"{what}: no number (tried to {number}) reaches {told}.")


def main() -> int:
    """Measure, simulate, tell; return the exit status: 1 where the target cannot be reached."""
    arguments = parse()
    try:
        table, load = gather(arguments)
        devices = Devices(
            fit(table),
            Limits(table.max_batch_tokens),
            overlapping=table.overlapping,
            interference=table.interference,
            queue_places=arguments.max_queue_size,
        )
    except (PlanError, ServiceError) as error:
        print(f"This cannot be planned: {error}", file=sys.stderr)
        return 2
    milliseconds = arguments.p50_ms, arguments.p99_ms
    target = Target(*(None if each is None else each / 1000 for each in milliseconds))
    tried = [
        options(load, devices, target, arguments.requests, replicas=replicas)
        for replicas in (False, True)
    ]
    report(table, load, target, tried)
    return 0 if all(some[-1].meets for some in tried) else 1


if __name__ == "__main__":
    sys.exit(main())
