"""`python -m tools.replay LOG --url URL`: does a server still answer as it did, or as another did?

Sends every request that `REPLAY_LOG` has written to the server, and compares its answers with those
in the log: the numbers bit by bit, and where they differ by their distance.
"""

import argparse
import base64
import json
import os
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from statistics import median
from urllib.parse import quote

import httpx2
from backports import zstd

from smart_embedder.engine.canaries import TOLERANCES, tolerance_of
from smart_embedder.observability.logs import escape_text
from tools.replay.numbers import BITS, Numbers, are_equal, distance, dtype_of, numbers_of
from tools.service import Service, add_server
from tools.verify.space import what_differs

_DESCRIPTION = """
Send the requests of a log of REPLAY_LOG to a server, and compare its answers with those of the log.
The exit status is 0 where all are equal or as near as rounding explains, 1 where one is not, was
refused or is of another vector space, and 2 where none could be compared.
"""
# What may become of a request, and of a line.
EQUAL = "equal to the last bit"
NEAR = "different, as near as rounding explains"
FAR = "different, farther than that"
OTHER_SPACE = "of another vector space"
REFUSED = "refused"
NOT_USED = "lines that could not be used"
_WORST = 5
# Reasons, and characters of one.
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Logged:
    """A logged request and the numbers of its answer."""

    request_id: str
    path: str
    headers: dict[str, str]
    body: str
    dtype: str
    kind: str
    spaces: dict[str, str]
    precisions: dict[str, str]
    numbers: Numbers

    @classmethod
    def of(cls, line: str) -> "Logged":
        """Of a line of the log; raises `ValueError` with the reason where it cannot be used."""
        try:
            told = json.loads(line)
            for part, reason in told["left_out"].items():
                raise ValueError(f"its {part} was left out for its {reason}")
            spaces, body, answer = told["vector_space"], told["body"], told["answer"]
            asked, kind = json.loads(body), next(iter(spaces))
            if not told["path"].startswith("/"):  # Behind an address it could be another one.
                raise LookupError  # noqa: TRY301
            packed = b"".join(map(base64.b64decode, answer["data"]))
            zipped = answer["encoding"] != "zstd"
            content = zlib.decompress(packed, wbits=31) if zipped else zstd.decompress(packed)
            dtype = dtype_of(asked)
            return cls(
                told["request_id"],
                told["path"],
                told["headers"],
                body,
                dtype,
                kind,
                spaces,
                told["precision"],
                numbers_of(content, answer["type"], kind, dtype),
            )
        except json.JSONDecodeError:
            raise ValueError("it is no whole line of JSON") from None
        except (LookupError, TypeError, AttributeError, StopIteration, zlib.error, zstd.ZstdError):
            raise ValueError("it is no line of REPLAY_LOG") from None


@dataclass(slots=True)
class Report:
    """What became of the requests: `outcomes`, and of some of them why, each with how often.

    `distances` are those of the texts whose numbers differ, by kind; `farthest` has the largest of
    each request, and its kind.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    distances: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    farthest: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, outcome: str, *reasons: str) -> None:
        """Count a request, or a line that is none."""
        self.outcomes[outcome] += 1
        self.reasons.update(f"{outcome}: {escape_text(each, _SHOWN)}" for each in reasons)

    def compare(self, logged: Logged, answer: httpx2.Response, precisions: dict[str, str]) -> None:
        """Count an answer; `precisions` are those of the server's models, by `_weights`."""
        if answer.status_code == HTTPStatus.PRECONDITION_FAILED:
            self.add(OTHER_SPACE, _sentence(answer))
            return
        if answer.status_code != HTTPStatus.OK:
            self.add(REFUSED, f"{answer.status_code} {_sentence(answer)}")
            return
        try:
            media_type = answer.headers.get("content-type", "")
            numbers = numbers_of(answer.content, media_type, logged.kind, logged.dtype)
        except ValueError as error:
            self.add(REFUSED, f"200, but {error}")
            return
        ids = [each.strip() for each in answer.headers.get("vector-space", "").split(",")]
        now = {each.partition("-")[0]: each for each in ids if each}
        exact = are_equal(logged.numbers, numbers)
        near = exact or self._are_near(logged, numbers, now, precisions)
        differing = [
            f"{kind}: {what_differs(now[kind], space)}"
            for kind, space in logged.spaces.items()
            if kind in now and now[kind] != space
        ]
        if differing:
            self.add(OTHER_SPACE, *differing)
        else:
            self.add(EQUAL if exact else NEAR if near else FAR)

    def _are_near(
        self, logged: Logged, numbers: Numbers, now: dict[str, str], precisions: dict[str, str]
    ) -> bool:
        """Whether all distances, which are kept, are as small as rounding explains."""
        near = True
        for row in logged.numbers.keys() | numbers.keys():
            kind, apart = row[0], distance(logged.numbers, numbers, row)
            # Late interaction makes scores of all kinds.
            own = kind.removesuffix(BITS)
            of = [own] if own in logged.precisions else [*logged.precisions]
            told = [precisions.get(_weights(now.get(each, ""))) for each in of]
            limit = tolerance_of(*(logged.precisions[each] for each in of), *told)
            if own != kind:  # A number near zero may get another sign.
                limit = max(limit, TOLERANCES["int8"])
            near = near and apart <= limit
            self.distances[kind].append(apart)
            before = self.farthest.get(logged.request_id, (0.0, ""))
            self.farthest[logged.request_id] = max(before, (apart, kind))
        return near

    def lines(self) -> Iterator[str]:
        """The report."""
        for outcome in (EQUAL, NEAR, FAR, OTHER_SPACE, REFUSED, NOT_USED):
            yield f"{self.outcomes[outcome]:7} {outcome}"
        for kind, apart in sorted(self.distances.items()):
            yield (
                f"{kind}: distance {max(apart):.1e} at most, {median(apart):.1e} in the middle, "
                f"of {len(apart)} whose numbers differ or stand beside some that do"
            )
        for reason, times in self.reasons.most_common(_SHOWN):
            yield f"{reason} ({times} times)"
        worst = sorted(self.farthest.items(), key=lambda each: each[1], reverse=True)[:_WORST]
        if worst:
            told = (f"{escape_text(id_)} ({kind} {apart:.1e})" for id_, (apart, kind) in worst)
            yield f"The farthest: {', '.join(told)}"

    @property
    def status(self) -> int:
        """The exit status."""
        if not any(self.outcomes[each] for each in (EQUAL, NEAR, FAR, OTHER_SPACE)):
            return 2
        return int(any(self.outcomes[each] for each in (FAR, OTHER_SPACE, REFUSED)))


def main(argv: Sequence[str] | None = None) -> int:
    """Repeat the requests, print the report, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.replay",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="what REPLAY_LOG named")
    add_server(parser)
    options = parser.parse_args(argv)
    report = Report()
    try:
        with closing(Service(options.url, options.token, options.timeout)) as service:
            replay(lines_of(options.log), service, report)
    except OSError as error:
        print(f"Nothing was repeated: {options.log}: {error.strerror}", file=sys.stderr)
        return 2
    print(*report.lines(), sep="\n")
    return report.status


def lines_of(log: Path) -> Iterator[str]:
    """The lines that it has now: a server that is asked may write to the same file."""
    with log.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        for line in file:
            left -= len(line)
            if left < 0:
                return
            yield line.decode(errors="replace")


def replay(lines: Iterable[str], service: Service, report: Report) -> None:
    """Send the request of each line, one after the other."""
    precisions: dict[str, str] = {}
    with suppress(httpx2.HTTPError, LookupError, TypeError):
        service.read_health()
        for model in service.health["models"]:
            told = {_weights(each): model["precision"] for each in model["vector_space"].values()}
            precisions |= told
    for line in filter(str.strip, lines):
        try:
            logged = Logged.of(line)
        except ValueError as error:
            report.add(NOT_USED, str(error))
            continue
        try:
            body = logged.body.encode()
            answer = service.post(quote(logged.path), body, headers=logged.headers)
        except httpx2.HTTPError as error:
            report.add(REFUSED, f"no answer: {type(error).__name__}")
            continue
        report.compare(logged, answer, precisions)


def _weights(space: str) -> str:
    """The first two parts of an id, which tell the model that makes a kind."""
    return "-".join(space.split("-")[:2])


def _sentence(answer: httpx2.Response) -> str:
    """What an error says, in any dialect; without the request's own id, so that equal ones meet."""
    try:
        told = answer.json()
    except ValueError:
        return answer.text[:_SHOWN]
    for name in ("detail", "error", "message"):
        if isinstance(told, dict) and name in told:
            told = told[name]
    return str(told)[:_SHOWN]


if __name__ == "__main__":
    sys.exit(main())
