"""Whether vectors of two servers may be mixed: what both make of the canaries, side by side.

What a server makes is kept as JSON: `texts`, and in `kinds` for each kind `vector_space`, `dtype`
and `kernels`, null where the server does not tell them, and `rows`, one for each text, as
`KindCanaries` has them: of sparse vectors with their `columns`, of ColBERT vectors the mean.
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
from tools.answers import embedding_in
from tools.service import EMBED, Service, describe
from tools.verify.canaries import CANARIES, KindCanaries, canaries_of, tolerance_of

# Characters of what a server says.
_SHOWN = 500
# Lengths that differ by less are one.
_SHARE_OF_LENGTH = 0.01
_WRONG_SHAPE = (AttributeError, LookupError, TypeError, ValueError)


class CannotCompareError(Exception):
    """A server or a file has no canaries; the text says why."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The vectors that a server made of the canaries, their space, and how it computes them."""

    canaries: KindCanaries
    space: str | None = None
    dtype: str | None = None
    kernels: str | None = None


def check_space(path: Path, options: argparse.Namespace) -> int:
    """Keep in `path` what the server makes, or compare it with that; the exit status."""
    before = _read(path) if path.exists() else None
    kinds = ask(options.url, options.token, options.timeout, options.model)
    if before is None:
        _write(path, kinds)
        for kind, each in kinds.items():
            told = each.space or "the server does not tell its space"
            print(f"{kind}: {len(CANARIES)} texts kept in {path} ({told})")
        return 0
    may_be_mixed = []
    for kind in VECTORS:
        if kind in before and kind in kinds:
            verdict, sentences = compare(before[kind], kinds[kind])
            may_be_mixed.append(verdict)
            print(f"{kind}: {'may' if verdict else 'MAY NOT'} be mixed: {'; '.join(sentences)}.")
        elif kind in before or kind in kinds:
            where = path if kind in before else options.url
            print(f"{kind}: not compared: only {where} has such vectors.")
    if not may_be_mixed:
        raise CannotCompareError(f"{path} and {options.url} have no kind of vectors in common")
    return 0 if all(may_be_mixed) else 1


def compare(before: Kind, now: Kind) -> tuple[bool, list[str]]:
    """Whether vectors of both may be mixed, and why, in sentences without their full stops."""
    old, new = (each.canaries for each in (before, now))
    widths = [each.rows.shape[1] for each in (old, new)]
    if old.columns is None and widths[0] != widths[1]:
        return False, [f"they have {widths[1]} dimensions, and had {widths[0]}"]
    lengths = [float(np.median(np.linalg.norm(each.rows, axis=1))) for each in (old, new)]
    scaled = old.columns is None and abs(lengths[1] - lengths[0]) > _SHARE_OF_LENGTH * max(lengths)
    if scaled:
        old, new = _unit(old), _unit(new)
    distances = new.distances(old)
    worst, tolerance = float(distances.max()), tolerance_of(before.dtype, now.dtype)
    agree = worst <= tolerance
    sentences = list(_of_spaces(before.space, now.space, agree=agree))
    if scaled:
        sentences.append(
            f"their length is {lengths[1]:.4g}, and was {lengths[0]:.4g}: these are the distances "
            "of both scaled to length 1"
        )
    sentences.append(
        f"distance {worst:.1e} at most, {np.median(distances):.1e} in the middle, where rounding "
        f"explains {tolerance:.0e}"
    )
    for fact, new_value, old_value in (
        ("number format", now.dtype, before.dtype),
        ("kernels", now.kernels, before.kernels),
    ):
        if new_value != old_value:
            sentences.append(f"{fact}: {new_value or 'not told'}, was {old_value or 'not told'}")
    same = before.space == now.space or None in {before.space, now.space}
    return agree and same and not scaled, sentences


def _of_spaces(before: str | None, now: str | None, *, agree: bool) -> Iterator[str]:
    if before is None or now is None:
        verdict = "by their numbers they agree" if agree else "their numbers differ"
        yield (
            f"{verdict}; whether they are of one space is not told by both servers, and of how "
            "long texts are cut these short ones show nothing"
        )
    elif before != now:
        yield f"they are of another space: {now}, was {before}"
    elif agree:
        yield "they are of the same space"
    else:
        yield "both servers tell the same space, but the numbers differ"


def _unit(canaries: KindCanaries) -> KindCanaries:
    lengths = np.linalg.norm(canaries.rows, axis=1, keepdims=True)
    return replace(canaries, rows=canaries.rows / np.maximum(lengths, 1e-12))


def ask(url: str, token: str | None, timeout: float, model: str | None) -> dict[str, Kind]:
    """What the server makes of the canaries; raises `CannotCompareError`."""
    service = Service(url.removesuffix("/v1"), token, timeout)
    with closing(service):
        try:
            service.read_health()
            kinds = _native(service, model) if service.health else _openai(service, model)
        except httpx2.HTTPError as error:
            raise CannotCompareError(f"{url} does not answer: {error}") from None
        except _WRONG_SHAPE as error:
            raise CannotCompareError(
                f"{url} answers in a way that is not known here: {type(error).__name__}: "
                f"{escape_text(str(error), _SHOWN)}"
            ) from None
    for kind, each in kinds.items():
        if len(each.canaries.rows) != len(CANARIES) or not np.isfinite(each.canaries.rows).all():
            raise CannotCompareError(f"{url} made {kind} vectors that are no numbers, or too few")
    return kinds


def _native(service: Service, model: str | None) -> dict[str, Kind]:
    named = {} if model is None else {"model": model}
    body = {"sentences": CANARIES, "sparse_as_indices": True, **named}
    told = _answer(service, EMBED, body)
    found = canaries_of([embedding_in(each["embeddings"]) for each in told["data"]])
    # Versions before 2.0 do not tell it.
    spaces = told.get("vector_space") or {}
    # Again: a model of MODELS may have been loaded for this request.
    service.read_health()
    models = {model["name"]: model["info"] for model in service.health.get("served_models", ())}
    kinds = {}
    for kind, each in found.items():
        info = models.get(told.get(f"{kind}_model_name")) or {}
        paths = [*sorted({*info.get("paths", {}).values()}), *filter(None, [info.get("kernels")])]
        facts = spaces.get(kind), info.get("dtype"), " ".join(paths) or None
        kinds[kind] = Kind(each, *map(_text, facts))
    return kinds


def _text(told: Any) -> str | None:
    """What a server says of itself, safe for a terminal."""
    return None if told is None else escape_text(str(told), _SHOWN)


def _openai(service: Service, model: str | None) -> dict[str, Kind]:
    """Of dense vectors alone, of which such a server tells nothing."""
    if model is None:
        listed = _read_json(service.get("/v1/models"), "/v1/models")["data"]
        names = [str(each["id"]) for each in listed]
        if len(names) != 1:
            raise CannotCompareError(
                f"{service.url} serves {len(names)} models: name one with --model"
                f" ({escape_text(', '.join(names[:10]), _SHOWN)})"
            )
        (model,) = names
    body = {"model": model, "input": CANARIES, "encoding_format": "float"}
    data = sorted(_answer(service, "/v1/embeddings", body)["data"], key=lambda each: each["index"])
    return {"dense": Kind(KindCanaries(np.array([each["embedding"] for each in data], np.float32)))}


def _answer(service: Service, path: str, body: dict[str, Any]) -> Any:
    return _read_json(service.post(path, body), path)


def _read_json(answer: httpx2.Response, path: str) -> Any:
    if answer.status_code != HTTPStatus.OK:
        raise CannotCompareError(f"{path} was refused: {escape_text(describe(answer), _SHOWN)}")
    return answer.json()


def _write(path: Path, kinds: dict[str, Kind]) -> None:
    kept = {
        kind: {
            "vector_space": each.space,
            "dtype": each.dtype,
            "kernels": each.kernels,
            "rows": each.canaries.rows.tolist(),
        }
        | ({} if each.canaries.columns is None else {"columns": each.canaries.columns.tolist()})
        for kind, each in kinds.items()
    }
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(json.dumps({"texts": CANARIES, "kinds": kept}), "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise CannotCompareError(f"{path} cannot be written: {error.strerror}") from None


def _read(path: Path) -> dict[str, Kind]:
    try:
        told = json.loads(path.read_text("utf-8"))
        texts, kinds = told["texts"], {kind: _kept(each) for kind, each in told["kinds"].items()}
    except OSError as error:
        raise CannotCompareError(f"{path} cannot be read: {error.strerror}") from None
    except _WRONG_SHAPE:
        raise CannotCompareError(
            f"{path} is no file that --space wrote: name one that does not exist to write it"
        ) from None
    if texts != [*CANARIES]:
        raise CannotCompareError(f"{path} has vectors of other texts than this version compares")
    return kinds


def _kept(told: dict[str, Any]) -> Kind:
    rows, columns = np.array(told["rows"], np.float32), None
    if "columns" in told:
        columns = np.array(told["columns"], np.int64)
    if rows.shape != (
        len(CANARIES),
        rows.size // len(CANARIES) if columns is None else len(columns),
    ):
        raise ValueError
    facts = (told[name] for name in ("vector_space", "dtype", "kernels"))
    return Kind(KindCanaries(rows, columns), *facts)
