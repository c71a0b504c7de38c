"""The results of a client's methods, read from answers of which nothing is believed unchecked."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from smart_embedder_client import limits, safetensors
from smart_embedder_client.errors import (
    MALFORMED,
    UNEXPECTED_ANSWER,
    VECTOR_SPACE_UNKNOWN,
    SmartEmbedderError,
    check_status,
    json_object,
    refusal,
    unexpected_answer,
)
from smart_embedder_client.safetensors import Array

_NUMPY_TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    # Which numpy does not have.
    "bfloat16": np.float32,
    "int8": np.int8,
    "binary": np.int8,
    "uint8": np.uint8,
    "ubinary": np.uint8,
}
_OF_BITS = ("binary", "ubinary")
_BITS = 8
_SCALED = ("int8", "uint8")
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
_CHANGED = "the service has changed its model between two requests for parts of a list"
_UNKNOWN = (
    "the service does not say that its vectors are in the space that was asked for: it is older "
    "than this client"
)


def dtype_of(options: Mapping[str, Any]) -> str:
    """The type of numbers that the options ask for."""
    return str(options.get("output_dtype", "float32"))


def check_tensors(
    tensors: Mapping[str, Array], options: Mapping[str, Any], texts: int, told: object
) -> None:
    """Raise `ValueError` unless these are the vectors of so many texts, with these options.

    `told` is what the answer says about the type of its numbers. A model that does not make a kind
    may leave it out where it was asked for by default alone.
    """
    if told != dtype_of(options):
        raise ValueError(f"numbers of the type {told!r:.80}")
    expected = set[str]()
    for kind, names, asked, is_needed in _kinds(options):
        if names[0] in tensors and not asked:
            raise ValueError(f"vectors that were not asked for: {kind}")
        if names[0] in tensors:
            expected.update(names)
        elif is_needed and texts:
            raise ValueError(f"no {kind} vectors")
    if set(tensors) != expected or bool(texts) != bool(expected):
        raise ValueError(f"the tensors {', '.join(sorted(tensors)) or 'are none'}")
    if texts:
        _check_arrays(tensors, options, texts)


def _kinds(options: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], bool, bool]]:
    """Each kind: its tensors, whether it was asked for, and whether it must be there."""
    is_scaled = dtype_of(options) in _SCALED
    dense = ("dense", "dense_scale") if is_scaled else ("dense",)
    colbert = ("colbert", "colbert_offsets", *(("colbert_scale",) if is_scaled else ()))
    sparse = ("sparse_offsets", "sparse_indices", "sparse_values")
    for kind, names in (("dense", dense), ("sparse", sparse), ("colbert", colbert)):
        given = options.get(f"return_{kind}")
        # The client's own default is without ColBERT.
        yield kind, names, given is not False and (given or kind != "colbert"), given is True
    muvera = options.get("muvera") is not None
    yield "muvera", ("muvera",), muvera, muvera


def _check_arrays(tensors: Mapping[str, Array], options: Mapping[str, Any], texts: int) -> None:
    dtype = dtype_of(options)
    numbers = _NUMPY_TYPES[dtype]
    for name in ("dense", "colbert"):
        if name in tensors:
            # Those of ColBERT are divided by their offsets.
            rows = texts if name == "dense" else len(tensors[name])
            _check_array(tensors, name, numbers, rows, 2)
            if dtype in _SCALED:
                _check_array(tensors, f"{name}_scale", np.float32, rows, 1)
    dimensions = options.get("dimensions")
    if "dense" in tensors and dimensions is not None:
        width = -(-dimensions // _BITS) if dtype in _OF_BITS else dimensions
        if tensors["dense"].shape[1] != width:
            raise ValueError(f"dense vectors of {tensors['dense'].shape[1]} numbers")
    if "muvera" in tensors:
        _check_array(tensors, "muvera", np.float32, texts, 2)
    if "colbert" in tensors:
        _check_offsets(tensors, "colbert_offsets", texts, len(tensors["colbert"]))
    if "sparse_offsets" in tensors:
        _check_sparse(tensors, texts)


def _check_array(
    tensors: Mapping[str, Array], name: str, dtype: Any, rows: int, dimensions: int
) -> None:
    """Raise `ValueError` unless it has so many rows, none of which is empty, of finite numbers."""
    array = tensors[name]
    if array.dtype != dtype or array.ndim != dimensions or len(array) != rows:
        raise ValueError(f"{name} of {array.dtype} in the shape {array.shape} for {rows} rows")
    if dimensions > 1 and not array.shape[1]:
        raise ValueError(f"{name} without numbers")
    # NaN and infinity show in the least and the largest number, without another array.
    if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
        raise ValueError(f"{name} with numbers that are not finite")


def _check_offsets(tensors: Mapping[str, Array], name: str, texts: int, rows: int) -> None:
    offsets = tensors[name]
    _check_array(tensors, name, np.int64, texts + 1, 1)
    if offsets[0] != 0 or offsets[-1] != rows or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{name} that do not divide {rows} rows")


def _check_sparse(tensors: Mapping[str, Array], texts: int) -> None:
    offsets, indices = tensors["sparse_offsets"], tensors["sparse_indices"]
    _check_offsets(tensors, "sparse_offsets", texts, len(indices))
    _check_array(tensors, "sparse_indices", np.uint32, len(indices), 1)
    _check_array(tensors, "sparse_values", np.float32, len(indices), 1)
    # Within a text they rise, so that none is there twice.
    falls = np.flatnonzero(indices[1:] <= indices[:-1]) + 1
    if not np.isin(falls, offsets).all():
        raise ValueError("sparse_indices that do not rise")


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """Lexical weights: `values[i]`, float32, is that of the token `indices[i]`, uint32."""

    indices: npt.NDArray[np.uint32]
    values: FloatArray

    def as_dict(self) -> dict[int, float]:
        """The weight of each token's id."""
        return dict(zip(self.indices.tolist(), self.values.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class TokenStrings:
    """The tokens of one text: a string for each sparse weight, and for each ColBERT vector."""

    sparse: list[str] | None
    colbert: list[str] | None


@dataclass(frozen=True, slots=True, eq=False)
class Tokenized:
    """The tokens of one text, without special ones.

    Attributes:
        ids: `[tokens]`, int64.
        spans: `[tokens, 2]`, int64: the characters at which each token begins and ends.
    """

    ids: IntArray
    spans: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The facts about a request in its answer.

    `usage` counts tokens, `timings_ms` has milliseconds, `warnings` says which texts were cut.
    `request_id` finds the request in the service's log.

    Attributes:
        vector_space: For each kind the id of the space of its vectors: those of one id may be
            compared. Empty of an older service.
    """

    model_name: str
    usage: dict[str, int]
    timings_ms: dict[str, float]
    warnings: list[dict[str, Any]]
    request_id: str | None
    vector_space: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embeddings(Report):
    """The vectors of `texts` in their order; a kind that was not asked for is None.

    Arrays are read-only. `dense` and `colbert` have the numbers of `output_dtype`: `float32` (also
    for bfloat16, with the values rounded to it), `float16`, `int8` (also for binary) or `uint8`
    (also for ubinary).

    Attributes:
        dense: `[texts, width]`.
        dense_scale: `[texts]` float32, for int8 and uint8.
        sparse: One for each text.
        colbert: `[vectors, width]` for each text.
        colbert_scale: `[vectors]` float32 for each text, for int8 and uint8.
        muvera: `[texts, 10240]` float32.
        tokens: One for each text, with `return_tokens`.
    """

    dense: Array | None = None
    dense_scale: FloatArray | None = None
    sparse: list[SparseVector] | None = None
    colbert: list[Array] | None = None
    colbert_scale: list[FloatArray] | None = None
    muvera: FloatArray | None = None
    tokens: list[TokenStrings] | None = None
    output_dtype: str
    dense_model_name: str
    sparse_model_name: str
    colbert_model_name: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranking(Report):
    """Passages by falling score.

    Attributes:
        indices: `[passages]` int64: their places in the request.
        scores: `[passages]` float32.
        passages: The texts, in the same order.
        parts: `dense`, `sparse` and `colbert`, each `[passages]` float32; late interaction only.
    """

    indices: npt.NDArray[np.int64]
    scores: FloatArray
    passages: list[str]
    parts: dict[str, FloatArray] | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the service can take requests.

    `status` is `healthy`, `loading`, `draining` or `unhealthy`, with a `reason`; `details` has
    everything that /health answers.
    """

    status: str
    reason: str | None
    details: dict[str, Any] = field(repr=False)

    @property
    def ready(self) -> bool:
        """Whether requests are answered now."""
        return self.status == "healthy"


def read_embeddings(
    response: httpx.Response, texts: Sequence[str], options: Mapping[str, Any]
) -> Embeddings:
    """The vectors of `texts`; raises `SmartEmbedderError` for an answer to anything else."""
    safetensors.check_media_type(response)
    try:
        content, most = response.content, limits.of_vectors(texts, options)
        tensors, told = safetensors.read(content, most)
        check_tensors(tensors, options, len(texts), told["output_dtype"])
        vectors = Embeddings(
            **by_text(tensors),
            output_dtype=told["output_dtype"],
            **_strings(told, "dense_model_name", "sparse_model_name", "colbert_model_name"),
            **_report(response, told, len(texts), options),
        )
        if told.get("tokens") is None:
            return vectors
        nothing = [None] * len(texts)
        sparse = nothing if vectors.sparse is None else [len(v.values) for v in vectors.sparse]
        colbert = nothing if vectors.colbert is None else [len(v) for v in vectors.colbert]
        each_text = zip(_list(told["tokens"], len(texts)), sparse, colbert, strict=True)
        return replace(vectors, tokens=[read_tokens(of, counts) for of, *counts in each_text])
    except MALFORMED as error:
        raise unexpected_answer(response, f"the vectors cannot be read: {error!r}") from error


def read_spaces(response: httpx.Response, options: Mapping[str, Any]) -> dict[str, str]:
    """The id of the space of each kind, as a header says; empty of an older service.

    Raises `SmartEmbedderError` if it is not said although certain spaces were asked for.
    """
    ids = [each.strip() for each in response.headers.get("vector-space", "").split(",")]
    if not all(each.isascii() and each.isprintable() for each in ids):
        raise unexpected_answer(response, "its header Vector-Space is no list of ids")
    spaces = {each.partition("-")[0]: each for each in ids if each}
    if options.get("if_vector_space") and not spaces:
        raise SmartEmbedderError(_UNKNOWN, VECTOR_SPACE_UNKNOWN, response.status_code)
    return spaces


def by_text(tensors: Mapping[str, Array]) -> dict[str, Any]:
    """The vectors that there are, those of several for a text divided: views, by their names."""
    whole = ("dense", "dense_scale", "muvera")
    found: dict[str, Any] = {name: tensors[name] for name in whole if name in tensors}

    def divided(name: str, kind: str) -> list[Array]:
        return np.split(tensors[name], tensors[f"{kind}_offsets"][1:-1])

    if "sparse_offsets" in tensors:
        parts = (divided(name, "sparse") for name in ("sparse_indices", "sparse_values"))
        found["sparse"] = [SparseVector(*pair) for pair in zip(*parts, strict=True)]
    for name in ("colbert", "colbert_scale"):
        if name in tensors:
            found[name] = divided(name, "colbert")
    return found


def read_tokens(told: Any, counts: Sequence[int | None]) -> TokenStrings:
    """The strings of one text; raises one of `MALFORMED` unless there are as many as `counts`."""
    found = (told["sparse"], told["colbert"])
    for strings, count in zip(found, counts, strict=True):
        # MUVERA has ColBERT's tokens without its vectors.
        if strings is None and count is None:
            continue
        length = len(strings) if count is None else count
        if not all(isinstance(each, str) for each in _list(strings, length)):
            raise TypeError("tokens that are no strings")
    return TokenStrings(*found)


def join_embeddings(parts: Sequence[Embeddings], sizes: Sequence[int]) -> Embeddings:
    """The answers to parts of a list, of so many texts, as one; `request_id` is the last one's.

    Raises:
        SmartEmbedderError: Another model has answered in between.
    """
    if len(parts) == 1:
        return parts[0]
    changed = SmartEmbedderError(_CHANGED, UNEXPECTED_ANSWER, httpx.codes.OK)
    names = ("dense_model_name", "sparse_model_name", "colbert_model_name", "vector_space")
    if any(getattr(part, name) != getattr(parts[0], name) for part in parts for name in names):
        raise changed
    joined: dict[str, Any] = {}
    for name in ("dense", "dense_scale", "sparse", "colbert", "colbert_scale", "muvera", "tokens"):
        found = [getattr(part, name) for part in parts if getattr(part, name) is not None]
        if found and len(found) < len(parts):
            raise changed
        if not found or isinstance(found[0], list):
            joined[name] = list(chain.from_iterable(found)) if found else None
            continue
        if len({array.shape[1:] for array in found}) > 1:
            raise changed
        joined[name] = np.concatenate(found)
        joined[name].flags.writeable = False
    return replace(
        parts[-1],
        **joined,
        usage=_sum([part.usage for part in parts]),
        timings_ms=_sum([part.timings_ms for part in parts]),
        warnings=[
            _moved(warning, start)
            for part, start in zip(parts, accumulate(sizes, initial=0), strict=False)
            for warning in part.warnings
        ],
    )


def _sum(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: sum(each.get(name, 0) for each in reports) for name in reports[0]}


def _moved(warning: dict[str, Any], start: int) -> dict[str, Any]:
    """The warning about a part, with the place of its text in the whole list."""
    target = warning["target"]
    index = target["index"] + start
    pointer = f"/sentences/{index}"
    message = warning["message"].replace(f"/sentences/{target['index']} ", f"{pointer} ", 1)
    moved = target | {"index": index, "pointer": pointer}
    return warning | {"message": message, "target": moved}


def read_ranking(
    response: httpx.Response, query: str, passages: Sequence[str], options: Mapping[str, Any]
) -> Ranking:
    """The order of `passages`; raises `SmartEmbedderError` for an answer to anything else."""
    check_status(response)
    try:
        told = limits.load_json(response.content, limits.of_ranking(query, passages))
        results = _list(told["results"], len(passages))
        places = [each["index"] for each in results]
        if sorted(places) != list(range(len(passages))) or not all(type(i) is int for i in places):
            raise ValueError("its places are not those of the passages, each once")
        if any(each["passage"] != passages[each["index"]] for each in results):
            raise ValueError("a passage that was not sent")
        scores = _scores([each["score"] for each in results])
        if (scores[1:] > scores[:-1]).any():
            raise ValueError("scores that do not fall")
        parts = [each.get("parts") or {} for each in results]
        names = sorted(parts[0])
        if any(sorted(each) != names for each in parts):
            raise ValueError("scores of other parts for each passage")
        return Ranking(
            indices=np.array(places, np.int64),
            scores=scores,
            passages=[passages[i] for i in places],
            parts={name: _scores([each[name] for each in parts]) for name in names} or None,
            **_report(response, told, len(passages), options),
        )
    except MALFORMED as error:
        raise unexpected_answer(response, f"the ranking cannot be read: {error!r}") from error


def _scores(numbers: Sequence[Any]) -> FloatArray:
    if not all(isinstance(each, int | float) for each in numbers):
        raise TypeError("scores that are no numbers")
    scores = np.array(numbers, np.float64)
    if not (np.abs(scores) <= np.finfo(np.float32).max).all():
        raise ValueError("scores that are no numbers")
    return scores.astype(np.float32)


def read_tokenized(response: httpx.Response, texts: Sequence[str]) -> list[Tokenized]:
    """The tokens of each text; raises `SmartEmbedderError` for any other answer."""
    check_status(response)
    try:
        told = limits.load_json(response.content, limits.of_tokens(texts))
        listed = zip(_list(told, len(texts)), texts, strict=True)
        return [_tokenized(tokens, text) for tokens, text in listed]
    except MALFORMED as error:
        raise unexpected_answer(response, f"the tokens cannot be read: {error!r}") from error


def _tokenized(told: Any, text: str) -> Tokenized:
    rows = [(token["id"], token["start"], token["stop"]) for token in _list(told, len(told))]
    if any(type(number) is not int for row in rows for number in row):
        raise TypeError("tokens without ids or places")
    table = np.array(rows, np.int64).reshape(-1, 3)
    spans = table[:, 1:]
    if rows and not (spans.min() >= 0 and spans.max() <= len(text)):
        raise ValueError("tokens beyond their text")
    return Tokenized(table[:, 0], spans)


def read_health(response: httpx.Response) -> Health:
    """An answer of /health, whatever it says; raises `SmartEmbedderError` for any other one."""
    told = json_object(response)
    status, reason = told.get("status"), told.get("reason")
    if not isinstance(status, str) or not isinstance(reason, str | None):
        raise refusal(response)
    return Health(status, reason, told)


def _report(
    response: httpx.Response, told: Mapping[str, Any], texts: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "vector_space": read_spaces(response, options),
        **_strings(told, "model_name"),
        "usage": _numbers(told["usage"], int),
        "timings_ms": _numbers(told["timings_ms"], int, float),
        "warnings": read_warnings(told["warnings"], range(texts)),
        "request_id": response.headers.get("x-request-id"),
    }


def read_warnings(told: Any, places: range) -> list[dict[str, Any]]:
    """Warnings; raises one of `MALFORMED` unless each is about a text in one of these places."""
    for each in _list(told, len(told)):
        index = each["target"]["index"]
        if not isinstance(each["code"], str) or not isinstance(each["message"], str):
            raise TypeError("a warning without a code or a sentence")
        if type(index) is not int or index not in places:
            raise ValueError(f"a warning about the text {index!r:.80}")
    warnings: list[dict[str, Any]] = told
    return warnings


def _strings(told: Mapping[str, Any], *names: str) -> dict[str, Any]:
    found = {name: told[name] for name in names}
    if not all(isinstance(each, str) for each in found.values()):
        raise TypeError("a name that is no string")
    return found


def _numbers(told: Any, *types: type) -> dict[str, Any]:
    if not isinstance(told, dict) or any(type(each) not in types for each in told.values()):
        raise TypeError("counts or times that are no numbers")
    if not all(map(math.isfinite, told.values())):
        raise ValueError("counts or times that are not finite")
    return told


def _list(told: Any, length: int) -> list[Any]:
    if not isinstance(told, list) or len(told) != length:
        raise TypeError(f"a list of {length} was expected")
    return told
