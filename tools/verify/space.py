"""Decide whether vectors of two servers may be mixed, by their vectors of the canaries.

The vectors of a server are stored as JSON: `texts`, and in `kinds` for each kind `vector_space`,
`dtype` and `kernels`, null if the server does not report them, and the `rows` and `columns` of
`KindCanaries`.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from app.logs import escape_text
from smart_embedder.vector_space import VECTORS
from tools.answers import read_embedding
from tools.service import EMBED, Service, describe
from tools.verify.canaries import CANARIES, KindCanaries, choose_tolerance, group_by_kind

# Of a server's response, in a message.
_MAX_CHARACTERS = 500
# Relative.
_LENGTH_TOLERANCE = 0.01
_WRONG_SHAPE = (AttributeError, LookupError, TypeError, ValueError)


class CannotCompareError(Exception):
    """A server or a file has no vectors of the canaries; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A server's vectors of the canaries, their vector space, number format and kernels."""

    canaries: KindCanaries
    space: str | None = None
    dtype: str | None = None
    kernels: str | None = None


def check_space(path: Path, options: argparse.Namespace) -> int:
    """Write the server's vectors to `path`, or compare them with those in it; return the status."""
    before = _read(path) if path.exists() else None
    kinds = ask_server(options.url, options.token, options.timeout, options.model)
    if before is None:
        _write(path, kinds)
        for name, kind in kinds.items():
            space = kind.space or "the server does not report its space"
            print(f"{name}: {len(CANARIES)} texts stored in {path} ({space})")
        return 0
    verdicts = []
    for name in VECTORS:
        if name in before and name in kinds:
            verdict, sentences = compare(before[name], kinds[name])
            verdicts.append(verdict)
            print(f"{name}: {'may' if verdict else 'MAY NOT'} be mixed: {'; '.join(sentences)}.")
        elif name in before or name in kinds:
            source = path if name in before else options.url
            print(f"{name}: not compared: only {source} has such vectors.")
    if not verdicts:
        raise CannotCompareError(f"{path} and {options.url} have no kind of vectors in common")
    return 0 if all(verdicts) else 1


def compare(before: Kind, now: Kind) -> tuple[bool, list[str]]:
    """Return whether vectors of both may be mixed, and the reasons, without full stops."""
    old, new = before.canaries, now.canaries
    widths = [canaries.rows.shape[1] for canaries in (old, new)]
    if old.columns is None and widths[0] != widths[1]:
        return False, [f"they have {widths[1]} dimensions, and had {widths[0]}"]
    lengths = [float(np.median(np.linalg.norm(canaries.rows, axis=1))) for canaries in (old, new)]
    scaled = old.columns is None and abs(lengths[1] - lengths[0]) > _LENGTH_TOLERANCE * max(lengths)
    if scaled:
        old, new = _normalize(old), _normalize(new)
    distances = new.distances(old)
    largest, tolerance = float(distances.max()), choose_tolerance(before.dtype, now.dtype)
    agree = largest <= tolerance
    sentences = list(_describe_spaces(before.space, now.space, agree=agree))
    if scaled:
        sentences.append(
            f"their length is {lengths[1]:.4g}, and was {lengths[0]:.4g}: the distances are those "
            "after scaling to length 1"
        )
    sentences.append(
        f"distance {largest:.1e} at most, median {np.median(distances):.1e}, where rounding "
        f"explains {tolerance:.0e}"
    )
    for fact, new_value, old_value in (
        ("number format", now.dtype, before.dtype),
        ("kernels", now.kernels, before.kernels),
    ):
        if new_value != old_value:
            sentences.append(f"{fact}: {new_value or 'unknown'}, was {old_value or 'unknown'}")
    same_space = before.space == now.space or None in {before.space, now.space}
    return agree and same_space and not scaled, sentences


def _describe_spaces(before: str | None, now: str | None, *, agree: bool) -> Iterator[str]:
    if before is None or now is None:
        verdict = "their numbers agree" if agree else "their numbers differ"
        yield (
            f"{verdict}; a server does not report its space, and these short texts do not show how "
            "long texts are truncated"
        )
    elif before != now:
        yield f"they have another space: {now}, was {before}"
    elif agree:
        yield "they have the same space"
    else:
        yield "both servers report the same space, but the numbers differ"


def _normalize(canaries: KindCanaries) -> KindCanaries:
    lengths = np.linalg.norm(canaries.rows, axis=1, keepdims=True)
    return replace(canaries, rows=canaries.rows / np.maximum(lengths, 1e-12))


def ask_server(url: str, token: str | None, timeout: float, model: str | None) -> dict[str, Kind]:
    """Return the server's vectors of the canaries by kind; raise `CannotCompareError`."""
    service = Service(url.removesuffix("/v1"), token, timeout)
    with closing(service):
        try:
            service.read_health()
            kinds = _ask_native(service, model) if service.health else _ask_openai(service, model)
        except httpx2.HTTPError as error:
            raise CannotCompareError(f"{url} does not answer: {error}") from None
        except _WRONG_SHAPE as error:
            raise CannotCompareError(
                f"{url} sent a response of another shape: {type(error).__name__}: "
                f"{escape_text(str(error), _MAX_CHARACTERS)}"
            ) from None
    for name, kind in kinds.items():
        if len(kind.canaries.rows) != len(CANARIES) or not np.isfinite(kind.canaries.rows).all():
            raise CannotCompareError(f"{url} sent {name} vectors with NaN, or too few vectors")
    return kinds


def _ask_native(service: Service, model: str | None) -> dict[str, Kind]:
    options = {} if model is None else {"model": model}
    body = {"sentences": CANARIES, "sparse_as_indices": True, **options}
    answer = _post(service, EMBED, body)
    by_kind = group_by_kind([read_embedding(item["embeddings"]) for item in answer["data"]])
    # Versions before 2.0 do not report it.
    spaces = answer.get("vector_space") or {}
    # A model of MODELS may have been loaded for this request.
    service.read_health()
    models = {model["name"]: model["info"] for model in service.health.get("served_models", ())}
    kinds = {}
    for name, canaries in by_kind.items():
        info = models.get(answer.get(f"{name}_model_name")) or {}
        paths = [*sorted({*info.get("paths", {}).values()}), *filter(None, [info.get("kernels")])]
        facts = spaces.get(name), info.get("dtype"), " ".join(paths) or None
        kinds[name] = Kind(canaries, *map(_escape, facts))
    return kinds


def _escape(fact: Any) -> str | None:
    """Escape a text of a server for the terminal."""
    return None if fact is None else escape_text(str(fact), _MAX_CHARACTERS)


def _ask_openai(service: Service, model: str | None) -> dict[str, Kind]:
    """Return the dense vectors of a server that has only OpenAI's API."""
    if model is None:
        listed = _read_json(service.get("/v1/models"), "/v1/models")["data"]
        names = [str(item["id"]) for item in listed]
        if len(names) != 1:
            raise CannotCompareError(
                f"{service.url} has {len(names)} models: name one with --model"
                f" ({escape_text(', '.join(names[:10]), _MAX_CHARACTERS)})"
            )
        (model,) = names
    body = {"model": model, "input": CANARIES, "encoding_format": "float"}
    data = sorted(_post(service, "/v1/embeddings", body)["data"], key=lambda item: item["index"])
    return {"dense": Kind(KindCanaries(np.array([item["embedding"] for item in data], np.float32)))}


def _post(service: Service, path: str, body: dict[str, Any]) -> Any:
    return _read_json(service.post(path, body), path)


def _read_json(answer: httpx2.Response, path: str) -> Any:
    if answer.status_code != HTTPStatus.OK:
        raise CannotCompareError(
            f"{path} was refused: {escape_text(describe(answer), _MAX_CHARACTERS)}"
        )
    return answer.json()


def _write(path: Path, kinds: dict[str, Kind]) -> None:
    content = {
        name: {
            "vector_space": kind.space,
            "dtype": kind.dtype,
            "kernels": kind.kernels,
            "rows": kind.canaries.rows.tolist(),
        }
        | ({} if kind.canaries.columns is None else {"columns": kind.canaries.columns.tolist()})
        for name, kind in kinds.items()
    }
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(json.dumps({"texts": CANARIES, "kinds": content}), "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise CannotCompareError(f"{path} cannot be written: {error.strerror}") from None


def _read(path: Path) -> dict[str, Kind]:
    try:
        content = json.loads(path.read_text("utf-8"))
        texts = content["texts"]
        kinds = {name: _parse_kind(kind) for name, kind in content["kinds"].items()}
    except OSError as error:
        raise CannotCompareError(f"{path} cannot be read: {error.strerror}") from None
    except _WRONG_SHAPE:
        raise CannotCompareError(
            f"{path} was not written by --space: name a file that does not exist to write it"
        ) from None
    if texts != [*CANARIES]:
        raise CannotCompareError(f"{path} has vectors of other texts than those of this version")
    return kinds


def _parse_kind(content: dict[str, Any]) -> Kind:
    rows, columns = np.array(content["rows"], np.float32), None
    if "columns" in content:
        columns = np.array(content["columns"], np.int64)
    if rows.shape != (
        len(CANARIES),
        rows.size // len(CANARIES) if columns is None else len(columns),
    ):
        raise ValueError
    facts = (content[name] for name in ("vector_space", "dtype", "kernels"))
    return Kind(KindCanaries(rows, columns), *facts)
