"""Sends a server every request of the description, and compares the responses with the rules."""

import base64
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
import orjson

from tests.oracle.comparison import distances
from tests.oracle.described import RULES, Question, Schema, questions
from tests.oracle.rules import Served, shown, texts_of
from tests.oracle.truth import RefusedError
from tests.support.formats import JSON, MESSAGE_PACK, Item, decode, from_message_pack

# For numbers in float32, as transformers computes them.
TOLERANCE = 1e-5
_REFUSALS = {400, 404, 412, 413, 422, 424}
_KINDS = ("dense", "sparse", "colbert", "muvera", "dense_scale", "colbert_scale")
_ROUNDED = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(slots=True)
class Outcome:
    """The result of all questions: `answers` and `refusals` agreed with the rules."""

    answers: Counter[str] = field(default_factory=Counter)
    refusals: int = 0
    wrong: list[str] = field(default_factory=list)


def check_every_request(
    client: httpx2.Client, description: Schema, served: Served, *, every: int = 1
) -> Outcome:
    outcome = Outcome()
    for number, question in enumerate(questions(description)):
        if number % every and len(question.options) < 2:
            continue
        expected = _expected(served, question)
        response = _send(client, question, served)
        faults = list(_faults(question, expected, response))
        if faults:
            outcome.wrong.append(f"{question}: {'; '.join(faults[:3])}")
        elif expected is None:
            outcome.refusals += 1
        else:
            outcome.answers[question.operation.answer] += 1
    return outcome


def _expected(served: Served, question: Question) -> Any:
    """Return the expected response, or None for a refusal."""
    if question.is_refused:
        return None
    try:
        return RULES[question.operation.answer].expect(served, question)
    except RefusedError:
        return None


def _send(client: httpx2.Client, question: Question, served: Served) -> httpx2.Response:
    rule = RULES[question.operation.answer]
    model = served.ranking_model if rule.of_reranker else served.dense_model
    name = served.m3.name if question.operation.answer == "SparseVectors" else model.name
    if question.operation.answer == "SieSpans" and served.classifier is not None:
        name = served.classifier.folder.name
    path = question.operation.path.replace("{model}", name)
    headers = {"Content-Type": question.reads, "Accept": question.writes}
    return client.post(path, content=orjson.dumps(question.body), headers=headers)


def _faults(question: Question, expected: Any, response: httpx2.Response) -> Iterator[str]:
    if expected is None:
        if response.status_code not in _REFUSALS:
            yield f"{response.status_code} and no refusal"
        return
    if response.status_code != 200:
        yield f"{response.status_code} {response.text[:200]}"
        return
    if response.headers["content-type"].partition(";")[0] != question.writes:
        yield f"the type is {response.headers['content-type']}"
        return
    dtypes = (question.body.get("output_dtype"), question.options.get("params.output_dtype"))
    dtype = next(filter(None, dtypes), "float32")
    actual = _read(question, response.content)
    # The order of warnings is not promised.
    for side in (expected, actual):
        if isinstance(side, dict) and question.operation.answer != "RerankResponse":
            side.get("warnings", []).sort(key=_warning_key)
    unread = RULES[question.operation.answer].unread
    for pointer, distance in distances("", expected, actual, unread):
        rounded = 0.0 if pointer.endswith("/sparse") else _ROUNDED.get(dtype, 0.0)
        # Negated, because every comparison with NaN is false.
        if not distance <= max(TOLERANCE, rounded):
            yield f"{pointer} differs by {distance:.2e}"


def _warning_key(warning: Item) -> tuple[int, str]:
    return warning["target"]["index"], warning["details"]["model"]


def _read(question: Question, content: bytes) -> Any:
    """Convert a response to the form of the expected one."""
    answer = question.operation.answer
    if answer == "EmbeddingResponse|Base64Response":
        items, members = decode(question.writes, content)
        texts = [*map(shown, texts_of(question.body["sentences"]))]
        if question.writes == JSON:  # Other formats leave out the texts.
            texts = [item["text"] for item in orjson.loads(content)["data"]]
        found = zip(texts, items, strict=True)
        return members | {"data": [{"text": text, "vectors": _vectors(x)} for text, x in found]}
    found = from_message_pack(content) if question.writes == MESSAGE_PACK else orjson.loads(content)
    if answer == "RerankResponse":
        found["warnings"] = [warning["target"]["pointer"] for warning in found["warnings"]]
    return found


def _vectors(item: Item) -> Item:
    """Return the arrays of a text, from any encoding."""
    found: Item = {}
    for name, value in item.items():
        if value is None:
            continue
        if name == "sparse":
            found[name] = _sparse(value)
        elif name in _KINDS:
            found[name] = _numbers(value)
        elif name.endswith("_tokens"):
            found[name] = _strings(value)
    return found


def _sparse(found: Any) -> dict[int, float]:
    if found.keys() == {"indices", "values"}:
        pairs = (_numbers(found[name]).tolist() for name in ("indices", "values"))
        return dict(zip(*pairs, strict=True))
    return {int(token): weight for token, weight in found.items()}


def _strings(found: Any) -> list[str]:
    if isinstance(found, dict):
        return [found[token] for token in sorted(found, key=int)]
    return list(found)


def _numbers(found: Any) -> Any:
    """Read an array, also from base64; bfloat16 has the upper half of float32's bits."""
    if isinstance(found, dict):
        raw = np.frombuffer(
            base64.b64decode(found["data"]), found["dtype"].replace("bfloat16", "<u2")
        )
        found = raw.reshape(found["shape"])
    values = np.asarray(found)
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values
