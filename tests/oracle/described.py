"""The requests that the OpenAPI description allows: every operation, format and option.

An operation has a rule (`tests.oracle.rules`) by the name of its response's schema, so that a new
path with a known response is tested without further code. `without_rule` lists everything in the
description that no rule covers, and must be empty.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.oracle.rules import Body, Rule
from tests.oracle.score_rules import SCORE_RULES
from tests.oracle.sie_rules import SIE_RULES
from tests.oracle.span_rules import SPAN_RULES
from tests.oracle.vector_rules import VECTOR_RULES

Schema = dict[str, Any]
RULES = VECTOR_RULES | SCORE_RULES | SPAN_RULES | SIE_RULES
_REFUSED = "Refused."
_FREE = object()
# Operations without vectors or scores, with the reason.
WITHOUT_TRUTH = {
    "GET /": "the service's version and addresses",
    "GET /health": "the state of the process",
    "GET /health/live": "the state of the process",
    "GET /health/ready": "the state of the process",
    "GET /stats": "counters of the process",
    "GET /metrics": "counters of the process",
    "GET /ping": "the state of the process",
    "GET /models/{model}/health": "the state of the process",
    "GET /info": "the settings in force",
    "GET /models/{model}/info": "the settings in force",
    "GET /v1/models": "the settings in force",
    "GET /v1/models/{model}": "the settings in force",
    "POST /v1/models/{model}/load": "a command",
    "POST /v1/models/{model}/unload": "a command",
}
# Parameters that do not change the content of a response.
_WITHOUT_EFFECT = {"Priority", "model"}


@dataclass(frozen=True, slots=True)
class Operation:
    """A method and a path: the schema of its response, its formats and its options."""

    name: str
    answer: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    options: dict[str, Schema]

    @property
    def path(self) -> str:
        return self.name.partition(" ")[2]


@dataclass(frozen=True, slots=True)
class Question:
    """A request: its body, the format of the body, and the format of the response."""

    operation: Operation
    body: Body
    reads: str
    writes: str
    options: Body

    @property
    def is_refused(self) -> bool:
        """Whether it sets an option that the description calls refused."""
        schemas = self.operation.options
        return any(
            schemas[name].get("description") == _REFUSED and value is not None
            for name, value in self.options.items()
        )

    def __str__(self) -> str:
        formats = f"{self.reads.partition('/')[2]} to {self.writes.partition('/')[2]}"
        return f"{self.operation.name} ({formats}) {json.dumps(self.options)[:100]}"


def operations(description: Schema) -> Iterator[Operation]:
    components = description["components"]["schemas"]
    for path, methods in description["paths"].items():
        for method, about in methods.items():
            body = about.get("requestBody", {}).get("content", {})
            parameters = about.get("parameters", [])
            query = [parameter for parameter in parameters if parameter["in"] == "query"]
            answer: Schema = about["responses"].get("200", {}).get("content", {})
            schema: Schema = next((content.get("schema", {}) for content in answer.values()), {})
            options: dict[str, Schema] = {
                parameter["name"]: parameter["schema"] for parameter in query
            }
            for content in body.values():
                options |= dict(_options_of(_resolved(content["schema"], components)))
            # No rule covers another header or parameter.
            others = (parameter["name"] for parameter in parameters if parameter not in query)
            options |= {name: {} for name in others if name not in _WITHOUT_EFFECT}
            yield Operation(
                f"{method.upper()} {path}",
                _name(schema),
                tuple(body),
                tuple(answer),
                options,
            )


def _resolved(schema: Any, components: Schema) -> Any:
    """Replace the references in a schema."""
    if isinstance(schema, list):
        return [_resolved(member, components) for member in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _resolved(components[schema["$ref"].rpartition("/")[2]], components)
    return {name: _resolved(member, components) for name, member in schema.items()}


def _options_of(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the fields of a body, and those of an optional object as `object.field`."""
    required = schema.get("required", ())
    for name, about in schema.get("properties", {}).items():
        members = [member for member in about.get("anyOf", [about]) if "properties" in member]
        if not members or name in required:
            yield name, about
            continue
        yield from ((f"{name}.{inner}", field) for inner, field in _options_of(members[0]))


def _as_body(options: Body) -> Body:
    body: Body = {}
    for name, value in options.items():
        *outer, last = name.split(".")
        inner = body
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return body


def _name(schema: Schema) -> str:
    """Return the name of a response's schema, or its format if it is not JSON."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if members := schema.get("anyOf", schema.get("oneOf")):
        return "|".join(map(_name, members))
    return str(schema.get("format", schema.get("type", "")))


def without_rule(description: Schema) -> list[str]:
    """List what only the description has, and no rule, or only a rule, and not the description."""
    missing: list[str] = []
    known = set()
    for operation in operations(description):
        known.add(operation.name)
        rule = RULES.get(operation.answer)
        if operation.name in WITHOUT_TRUTH:
            continue
        if rule is None:
            missing.append(f"{operation.name}: no rule for the answer {operation.answer!r}")
            continue
        formats = {*operation.reads, *operation.writes}
        missing += [f"{operation.name}: {media_type}" for media_type in formats - {*rule.formats}]
        missing += [f"{operation.name}: {problem}" for problem in _unknown_options(operation, rule)]
    missing += [f"{name}: is not in the description" for name in WITHOUT_TRUTH.keys() - known]
    return sorted(missing)


def _unknown_options(operation: Operation, rule: Rule) -> Iterator[str]:
    for name, schema in operation.options.items():
        if name in rule.texts or schema.get("description") == _REFUSED:
            continue
        if name not in rule.options:
            yield f"the option {name}"
            continue
        for value in _documented(schema):
            if value is not _FREE and value not in (None, *rule.options[name]):
                yield f"the value {value!r} of the option {name}"


def _documented(schema: Schema) -> list[Any]:
    """Return the values that a schema lists; `_FREE` for those that it only describes."""
    if "anyOf" in schema:
        return [value for member in schema["anyOf"] for value in _documented(member)]
    if "enum" in schema:
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    if schema.get("type") == "boolean":
        return [True, False]
    if schema.get("type") == "array":
        return [value if value is _FREE else [value] for value in _documented(schema["items"])]
    return [None] if schema.get("type") == "null" else [_FREE]


def questions(description: Schema) -> Iterator[Question]:
    """Yield every operation with every value of every option, in all formats, for all texts."""
    for operation in operations(description):
        if operation.name in WITHOUT_TRUTH:
            continue
        rule = RULES[operation.answer]
        for reads in operation.reads:
            for writes in operation.writes:
                for options in _all_options(operation, rule):
                    for texts in rule.bodies:
                        yield Question(operation, texts | _as_body(options), reads, writes, options)


def _all_options(operation: Operation, rule: Rule) -> Iterator[Body]:
    yield {}
    for name, schema in operation.options.items():
        if name in rule.texts:
            continue
        if schema.get("description") == _REFUSED:
            yield {name: {"not": "done"}}
            yield {name: None}
            continue
        nullable = None in _documented(schema)
        for value in (*rule.options[name], *([None] if nullable else [])):
            yield {name: value}
    for together in rule.together:
        if together.keys() <= operation.options.keys():
            yield together
