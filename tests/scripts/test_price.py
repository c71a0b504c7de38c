"""What `scripts.price` asks, and what it calls a finding; a run of its own has the real server."""

import json
import random
import socket
from collections.abc import Callable
from itertools import pairwise

import pytest

from scripts import price_grammar as grammar
from scripts.price import BYTES_BESIDE, FIRST, MIB, Answer, Cost, Judge, Result, sizes
from smart_embedder.main import create_app
from smart_embedder.settings import Settings

LARGEST = 4 * MIB


@pytest.fixture(scope="module")
def description() -> dict:
    return create_app(Settings(api_token=None)).openapi()


@pytest.fixture(scope="module")
def shapes(description: dict) -> list[grammar.Shape]:
    return grammar.draw(description, 3, ["other"], LARGEST)


class FakeServer:
    """Costs what it is told, for the size that is asked for."""

    def __init__(self, seconds: Callable[[int], float], **cost: object) -> None:
        self._seconds_of = seconds
        self._cost = {"held": 0.0, "rise": 0, "left_over": 0.0} | cost
        self.sizes: list[int] = []

    def measure(self, asked: grammar.Asked, size: int) -> Cost:
        self.sizes.append(size)
        held = self._cost["held"]
        cost = self._cost | {"held": held.pop(0) if isinstance(held, list) else held}
        facts = {"size": size, "sent": size, "status": 200, "place": "", "answer": 0}
        return Cost(asked=size, seconds=self._seconds_of(size), **facts, **cost)

    def trim(self) -> None:
        """There is no memory."""

    def seconds(self) -> float:
        return 0.0


def judge(server: FakeServer, limit: int = LARGEST) -> Result:
    shape = grammar.Shape("body", "a shape", limit, lambda size: grammar.Asked(b"x" * 8, size))
    return Judge(server).judge(shape)


def test_every_operation_and_type_of_body_is_asked_for(description, shapes) -> None:
    targets = [*grammar.targets(description)]
    bodies = [shape.name for shape in shapes if shape.family in {"body", "stream"}]
    missing = [
        target.name
        for target in targets
        if target.kinds
        and not any(name.startswith(target.name.partition("{")[0]) for name in bodies)
    ]
    pages = {target.path for target in targets if target.method == "GET"}
    assert not missing
    assert all(any(page.partition("{")[0] in shape.name for shape in shapes) for page in pages)


def test_every_field_of_a_schema_grows(description) -> None:
    schema = description["paths"]["/v2/embed"]["post"]["requestBody"]["content"]
    schema = schema["application/json"]["schema"]
    units = grammar.characters(random.Random(0))
    drawn = [each.name for each in grammar.other_values(schema, random.Random(0), units)]
    assert all(
        any(each.startswith(f"{name} = ") for each in drawn) for name in schema["properties"]
    )


def test_a_seed_gives_the_same_requests_and_another_gives_others(description, shapes) -> None:
    again = grammar.draw(description, 3, ["other"], LARGEST)
    assert [shape.name for shape in again] == [shape.name for shape in shapes]
    assert all(
        left.make(FIRST) == right.make(FIRST)
        for left, right in zip(shapes[::50], again[::50], strict=True)
    )
    drawn = [grammar.characters(random.Random(seed)) for seed in (3, 4)]
    assert drawn[0] != drawn[1]


def test_bodies_grow_with_the_size_that_is_asked_for(shapes) -> None:
    grown = [shape for shape in shapes if shape.family == "body" and "1 x string" in shape.name]
    assert grown
    for shape in grown:
        small, large = (shape.make(size) for size in (FIRST, 4 * FIRST))
        assert 0.6 * FIRST < small.size <= FIRST
        assert 3.5 < large.size / small.size < 4.5
        json.loads(large.content.partition(b"\r\n\r\n")[2])


def test_texts_of_one_request_differ_so_that_none_is_computed_for_another() -> None:
    schema = {"type": "array", "items": {"type": "string"}}
    values = grammar.valid_values(schema, random.Random(0), ["b "] * 4)
    texts = json.loads(next(e for e in values if e.name.startswith("1000 x ")).write(FIRST))
    assert len(set(texts)) == len(texts) == 1000


def test_unknown_names_come_with_and_without_what_is_required(description) -> None:
    schema = description["paths"]["/embed"]["post"]["requestBody"]["content"]
    schema = schema["application/json"]["schema"]
    drawn = [*grammar.other_values(schema, random.Random(0), ["b "])]
    named, without = (
        [json.loads(each.write(FIRST)) for each in drawn if told in each.name]
        for told in (", beside", ", and")
    )
    assert named
    assert without
    assert all("inputs" in each for each in named)
    assert not any("inputs" in each for each in without)


def test_the_characters_that_normalisation_makes_longest_are_found() -> None:
    assert "\ufdfa" in grammar.characters(random.Random(0))[:3]


def test_gzip_has_members_and_blocks_that_hold_nothing() -> None:
    made = {name: make for name, _, make in grammar.encodings(lambda size: b"x" * size)}
    assert made["members of gzip with ''"](LARGEST).size == 0
    assert made["blocks of gzip with nothing"](LARGEST).size == 0


def quick(_: int) -> float:
    return 0.001


def grows(power: float) -> Callable[[int], float]:
    return lambda size: 0.002 + 0.02 * (size / FIRST) ** power


CALM = [0.001] * 100
ALLOWED = BYTES_BESIDE + 20 * FIRST


@pytest.mark.parametrize(
    ("seconds", "cost", "told"),
    [
        (grows(1.5), {}, "a doubling costs"),
        (grows(2.0), {}, "a doubling costs"),
        (lambda size: 0.002 + size / MIB, {}, None),
        # Another way is taken from some size on.
        (lambda size: size / MIB / (1 if size >= MIB else 1.3), {}, None),
        # Nothing that anybody notices.
        (lambda size: 1e-4 * (size / FIRST) ** 1.2, {}, None),
        # Held only once.
        (quick, {"held": [*CALM[:4], 0.2, *CALM]}, None),
        (quick, {"held": 0.06}, "the loop is held for 60 ms"),
        (quick, {"rise": ALLOWED}, None),
        (quick, {"rise": ALLOWED + MIB}, "memory rises by 51 MiB of 50"),
        (quick, {"left_over": 3.0}, "goes on for 3.0 s"),
    ],
)
def test_growth_above_linear_and_costs_above_the_limits_are_findings(seconds, cost, told) -> None:
    findings = judge(FakeServer(seconds, **cost), FIRST if "rise" in cost else LARGEST).findings
    assert len(findings) == (told is not None)
    assert all(told in each for each in findings)


def test_sizes_double_up_to_the_limit() -> None:
    limits = {"body": LARGEST, "head": grammar.LARGEST_HEAD, "url": grammar.LARGEST_HEAD}
    for family, limit in limits.items():
        drawn = sizes(grammar.Shape(family, "it", limit, lambda size: grammar.Asked(b"", size)))
        # A head begins where it is read, and not refused for its size.
        first = FIRST if family == "body" else 2048
        assert (drawn[0], drawn[-1]) == (first, limit)
        assert all(one < other <= 2 * one for one, other in pairwise(drawn))


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (200, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
        (200, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
        (404, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"),
    ],
    ids=["with its length", "in chunks", "announced"],
)
def test_an_answer_ends_where_it_says_on_a_connection_that_stays_open(status, content) -> None:
    """Or waiting for more would count as the request's work."""
    server, client = socket.socketpair()
    with server, client:
        answer = Answer()
        server.sendall(content[:-1])
        answer.take(client)
        assert not answer.is_whole
        server.sendall(content[-1:])
        answer.take(client)
        assert (answer.is_whole, answer.status, answer.size) == (True, status, len(content))
