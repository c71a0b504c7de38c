"""Fuzzes JSON bodies of every dialect, with Python's own parser as the reference."""

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

import app.main  # noqa: F401 - imports the schemas of every dialect
from app.body import JsonValueCounter, parse_json
from app.schemas import RequestModel
from smart_embedder.errors import InvalidRequestError
from tests.fuzzing.inputs import (
    Target,
    check_sentence,
    count_plainly,
    cut,
    linear,
    outcome,
    read_input,
    seeds_of,
)
from tests.support.bodies import validate

# The depth that pydantic's parser and orjson refuse.
_LEAST_DEPTH_REFUSED = 200


def _schemas(base: type[RequestModel] = RequestModel) -> Iterator[type[RequestModel]]:
    for schema in base.__subclasses__():
        if schema.__module__.startswith("app.") and hasattr(schema, "example"):
            yield schema
        yield from _schemas(schema)


SCHEMAS = sorted(set(_schemas()), key=lambda schema: (schema.__module__, schema.__qualname__))
_SPECIAL = [
    b'{"sentences": ["a\\u00e9", "\\ud83d\\ude00", "\\\\\\""], "return_dense": true}',
    b'{"query": "q", "passages": [{"text": "a"}], "top_n": 1e3, "weights": {"dense": -0.5}}',
    b'{"sentences": ["' + b"\\\\" * 30 + b'\\ud83d\\ude00"]}',
    b'{"sentences": ["' + "é字\U0001f600".encode() * 8 + b'"]}',
    b'[[1, 2.5, -3e7, NaN, Infinity], {"a": {"b": null}}, ' + b"9" * 40 + b"]",
    b"[" * 50 + b"]" * 50,
    b'{"a": 1, "a": 2, "": "\\u0000"}',
    BOM_UTF8 + b'{"sentences": ["a"]}',
]


def seeds() -> Iterator[bytes]:
    examples = [json.dumps(dict(schema.example)).encode() for schema in SCHEMAS]
    return seeds_of([*dict.fromkeys(examples), *_SPECIAL])


def check(data: bytes) -> None:
    """Compare parsing, counting and validation with the reference."""
    chance, content = read_input(data)
    value, refused = outcome(lambda: from_json(content.removeprefix(BOM_UTF8)), ValueError)
    plain, refused_by_python = outcome(
        lambda: json.loads(content.decode("utf-8-sig")), ValueError, RecursionError
    )
    if refused is None:
        assert refused_by_python is None, refused_by_python
        assert repr(value) == repr(plain)
        _check_count(content, cut(content, chance))
    elif refused_by_python is None:
        assert _has_what_pydantic_refuses(plain, content), refused
    _check_schema(content, chance.choice(SCHEMAS))


def _has_what_pydantic_refuses(value: Any, content: bytes) -> bool:
    """Return whether a value may have a lone surrogate, deep nesting, or a very long number."""
    structure = content.count(b"[") + content.count(b"{")
    text = repr(value)
    return structure >= _LEAST_DEPTH_REFUSED or "\\ud" in text or len(content) > 4000


def _check_count(content: bytes, pieces: list[bytes]) -> None:
    """Check that the counter refuses exactly one value, or one byte outside strings, too many."""
    values, outside = count_plainly(content)
    for missing in ((0, 0), (1, 0), (0, 1)):
        most_values, most_outside = values - missing[0], outside - missing[1]
        if min(most_values, most_outside) < 0:
            continue
        refused = _refusal(JsonValueCounter(most_values, most_outside), content, pieces)
        assert (refused is not None) == any(missing), refused
        if refused is not None:
            check_sentence(refused)


def _refusal(
    counter: JsonValueCounter, content: bytes, pieces: list[bytes]
) -> InvalidRequestError | None:
    with linear(content, calls_per_byte=40):
        _, refused = outcome(lambda: [counter.feed(piece) for piece in pieces], InvalidRequestError)
    return refused


def _check_schema(content: bytes, schema: type[RequestModel]) -> None:
    with linear(content, calls_per_byte=60):
        _, refused = outcome(
            lambda: validate(parse_json(content, schema), schema), InvalidRequestError
        )
    if isinstance(refused, InvalidRequestError):
        check_sentence(refused)
        json.dumps(refused.problems, ensure_ascii=False).encode()


TARGETS = {"bodies": Target(seeds, check, 1500)}
