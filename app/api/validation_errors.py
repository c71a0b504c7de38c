"""Messages for invalid requests.

Each names the field, what was sent (its type and size, never its text), what is allowed, and an
example. The name of an unknown field is quoted, cut and escaped.
"""

import difflib
from collections.abc import Mapping
from typing import Any, get_args

import orjson
from pydantic import ValidationError

from app.api.schemas import MAX_PROBLEMS, RequestModel
from app.errors import InvalidRequestError
from app.observability.logs import escape_text

Item = Mapping[str, Any]
Location = tuple[int | str, ...]

_MAX_POINTER = 200
# Of unknown names: how many are compared with those of the fields, for one that is missing.
_MAX_SEARCHED = 3
_MAX_NAME = 60

_ALLOWED = {
    "list_type": "send a list of strings",
    "string_type": "send a string",
    "bool_type": "send true or false",
    "float_type": "send a number",
    "int_type": "send a whole number",
    "finite_number": "send a number",
    "string_unicode": "send text in Unicode, without lone surrogates",
}


def not_json(reason: str, model: type[RequestModel], size: int) -> InvalidRequestError:
    """The error for a body of `size` bytes that no parser reads; it shows an example of `model`."""
    message = f"the body is empty: send {_example(model)}"
    if size:
        message = (
            f"the body of {size} bytes is no JSON ({reason}): send an object such as "
            f"{_example(model)}"
        )
    return InvalidRequestError(message, [{"pointer": "", "message": message}])


def as_invalid_request(
    error: ValidationError, model: type[RequestModel], most: int = MAX_PROBLEMS
) -> InvalidRequestError:
    """The error for a body that is no valid `model`; lists `most` problems at most."""
    found = error.errors(include_url=False)
    unknown = [
        str(item["loc"][0])[:_MAX_NAME]
        for item in found
        if item["type"] == "extra_forbidden" and len(item["loc"]) == 1
    ]
    problems = [
        {"pointer": _pointer(item["loc"]), "message": _message(item, model, unknown)}
        for item in found[:most]
    ]
    return InvalidRequestError(problems[0]["message"], problems)


def _message(item: Item, model: type[RequestModel], unknown: list[str]) -> str:
    location: Location = item["loc"]
    match item["type"]:
        case "missing":
            # Where unknown fields are ignored, they are none of the errors.
            return _missing(str(location[-1]), model, unknown or _aliases_in(item["input"], model))
        case "extra_forbidden":
            return _unknown(str(location[-1])[:_MAX_NAME], _model_at(location, model))
        case _:
            return _wrong_value(item, model)


def _aliases_in(body: Any, model: type[RequestModel]) -> list[str]:
    return [name for name in model.aliases if name in body] if isinstance(body, dict) else []


def _missing(field: str, model: type[RequestModel], unknown: list[str]) -> str:
    aliases = [name for name in unknown if model.aliases.get(name.lower()) == field]
    near = (name for name in unknown[:_MAX_SEARCHED] if _suggest(name, model) == field)
    sent = next(iter(aliases), None) or next(near, None)
    if sent is not None:
        name = escape_text(sent)
        return (
            f"the field {field} is missing, and {name} is none: call it {field}, as in "
            f"{_example(model)}"
        )
    return f"the field {field} is missing: send it, as in {_example(model)}"


def _unknown(name: str, model: type[RequestModel]) -> str:
    meant = _suggest(name, model)
    advice = f"did you mean {meant}? There are" if meant else "there are"
    return f"there is no field {escape_text(name)} here: {advice} {', '.join(model.model_fields)}"


def _wrong_value(item: Item, model: type[RequestModel]) -> str:
    location: Location = item["loc"]
    kind, sent = item["type"], _describe(item["input"])
    if kind in {"model_type", "model_attributes_type"}:
        expected = _model_at((*location, ""), model)
        return f"{_name(location)} is {sent}: send an object such as {_example(expected)}"
    if kind == "greater_than_equal":
        return f"{_name(location)} is out of range: send at least {item['ctx']['ge']:g}"
    if kind == "less_than_equal":
        return f"{_name(location)} is out of range: send at most {item['ctx']['le']:.0f}"
    allowed = f"send {item['ctx']['expected']}" if kind == "literal_error" else _ALLOWED.get(kind)
    if allowed is None:  # pydantic's own message, which quotes nothing.
        return f"{_name(location)}: {item['msg']}"
    example = f", as in {_example(model)}" if location[0] in model.example else ""
    return f"{_name(location)} is {sent}: {allowed}{example}"


def _model_at(location: Location, model: type[RequestModel]) -> type[RequestModel]:
    """The model that has the field at `location`: `model` itself or one nested in it."""
    for part in location[:-1]:
        field = model.model_fields.get(str(part))
        kinds = get_args(field.annotation) if field else ()
        model = next((kind for kind in kinds if _is_model(kind)), model)
    return model


def _is_model(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, RequestModel)


def _suggest(name: str, model: type[RequestModel]) -> str | None:
    """The field that an unknown name most likely stands for."""
    if (known := model.aliases.get(name.lower())) is not None:
        return known
    return next(iter(difflib.get_close_matches(name.lower(), model.model_fields, 1)), None)


def _describe(value: Any) -> str:
    """The type and size of a value, in JSON's terms."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"a list of {len(value)} items"
        case _:
            return f"an object with {len(value)} fields"


def _name(location: Location) -> str:
    """The field as sentences[3] or weights.dense; the body where there is none."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    field = "".join(parts).removeprefix(".")
    return f"the field {field}" if field else "the body"


def _example(model: type[RequestModel]) -> str:
    return orjson.dumps(model.example).decode()


def _pointer(location: Location) -> str:
    parts = (str(part)[:_MAX_POINTER] for part in location)
    escaped = (part.replace("~", "~0").replace("/", "~1") for part in parts)
    return "".join(f"/{part}" for part in escaped)[:_MAX_POINTER]
