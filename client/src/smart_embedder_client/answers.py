"""The results of a client's methods, parsed from responses; every field is validated."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from smart_embedder_client import safetensors
from smart_embedder_client.errors import (
    MALFORMED,
    UNEXPECTED_ANSWER,
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
    # numpy has no bfloat16.
    "bfloat16": np.float32,
    "int8": np.int8,
    "binary": np.int8,
    "uint8": np.uint8,
    "ubinary": np.uint8,
}
_BINARY = ("binary", "ubinary")
_BITS_PER_BYTE = 8
_SCALED = ("int8", "uint8")
# The fields of `Embeddings` that have an entry for each text.
VECTOR_FIELDS = ("dense", "dense_scale", "sparse", "colbert", "colbert_scale", "muvera", "tokens")
_MODEL_NAMES = ("dense_model_name", "sparse_model_name", "colbert_model_name")
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


def requested_dtype(options: Mapping[str, Any]) -> str:
    """Return the number type that the options request."""
    return str(options.get("output_dtype", "float32"))


def check_tensors(
    tensors: Mapping[str, Array], options: Mapping[str, Any], count: int, dtype: object
) -> None:
    """Raise `ValueError` unless these are the vectors of `count` texts, with these options.

    `dtype` is the number type that the response names. A kind that the model does not have may be
    missing if it was requested by default only.
    """
    if dtype != requested_dtype(options):
        raise ValueError(f"numbers of the type {dtype!r:.80}")
    expected = set[str]()
    for kind, names, is_requested, is_required in _expected_kinds(options):
        if names[0] in tensors and not is_requested:
            raise ValueError(f"vectors that were not asked for: {kind}")
        if names[0] in tensors:
            expected.update(names)
        elif is_required and count:
            raise ValueError(f"no {kind} vectors")
    if set(tensors) != expected or bool(count) != bool(expected):
        raise ValueError(f"the tensors {', '.join(sorted(tensors)) or 'are none'}")
    if count:
        _check_arrays(tensors, options, count)


def _expected_kinds(
    options: Mapping[str, Any],
) -> Iterator[tuple[str, tuple[str, ...], bool, bool]]:
    """Yield each kind, its tensors' names, whether it was requested, and whether it is required."""
    is_scaled = requested_dtype(options) in _SCALED
    dense = ("dense", "dense_scale") if is_scaled else ("dense",)
    colbert = ("colbert", "colbert_offsets", *(("colbert_scale",) if is_scaled else ()))
    sparse = ("sparse_offsets", "sparse_indices", "sparse_values")
    for kind, names in (("dense", dense), ("sparse", sparse), ("colbert", colbert)):
        option = options.get(f"return_{kind}")
        # The client requests no ColBERT vectors by default.
        yield kind, names, option is not False and (option or kind != "colbert"), option is True
    has_muvera = options.get("muvera") is not None
    yield "muvera", ("muvera",), has_muvera, has_muvera


def _check_arrays(tensors: Mapping[str, Array], options: Mapping[str, Any], count: int) -> None:
    dtype = requested_dtype(options)
    for name in ("dense", "colbert"):
        if name in tensors:
            # The rows of ColBERT are checked with their offsets below.
            rows = count if name == "dense" else len(tensors[name])
            _check_array(tensors, name, _NUMPY_TYPES[dtype], rows, 2)
            if dtype in _SCALED:
                _check_array(tensors, f"{name}_scale", np.float32, rows, 1)
    dimensions = options.get("dimensions")
    if "dense" in tensors and dimensions is not None:
        width = -(-dimensions // _BITS_PER_BYTE) if dtype in _BINARY else dimensions
        if tensors["dense"].shape[1] != width:
            raise ValueError(f"dense vectors of {tensors['dense'].shape[1]} numbers")
    if "muvera" in tensors:
        _check_array(tensors, "muvera", np.float32, count, 2)
    if "colbert" in tensors:
        _check_offsets(tensors, "colbert_offsets", count, len(tensors["colbert"]))
    if "sparse_offsets" in tensors:
        _check_sparse(tensors, count)


def _check_array(
    tensors: Mapping[str, Array], name: str, dtype: Any, rows: int, dimensions: int
) -> None:
    """Raise `ValueError` unless the array has this type, and `rows` rows of finite numbers."""
    array = tensors[name]
    if array.dtype != dtype or array.ndim != dimensions or len(array) != rows:
        raise ValueError(f"{name} of {array.dtype} in the shape {array.shape} for {rows} rows")
    if dimensions > 1 and not array.shape[1]:
        raise ValueError(f"{name} without numbers")
    # Minimum and maximum are NaN or infinite if any number is; `isfinite(array)` would allocate.
    if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
        raise ValueError(f"{name} with numbers that are not finite")


def _check_offsets(tensors: Mapping[str, Array], name: str, count: int, rows: int) -> None:
    offsets = tensors[name]
    _check_array(tensors, name, np.int64, count + 1, 1)
    if offsets[0] != 0 or offsets[-1] != rows or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{name} that do not divide {rows} rows")


def _check_sparse(tensors: Mapping[str, Array], count: int) -> None:
    offsets, indices = tensors["sparse_offsets"], tensors["sparse_indices"]
    _check_offsets(tensors, "sparse_offsets", count, len(indices))
    _check_array(tensors, "sparse_indices", np.uint32, len(indices), 1)
    _check_array(tensors, "sparse_values", np.float32, len(indices), 1)
    # Within a text the indices rise, so that none occurs twice.
    descents = np.flatnonzero(indices[1:] <= indices[:-1]) + 1
    if not np.isin(descents, offsets).all():
        raise ValueError("sparse_indices that do not rise")


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """Lexical weights: `values[i]` (float32) is the weight of the token `indices[i]` (uint32)."""

    indices: npt.NDArray[np.uint32]
    values: FloatArray

    def as_dict(self) -> dict[int, float]:
        """Return the weights by token id."""
        return dict(zip(self.indices.tolist(), self.values.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class TokenStrings:
    """The tokens of one text: one string for each sparse weight and each ColBERT vector."""

    sparse: list[str] | None
    colbert: list[str] | None


@dataclass(frozen=True, slots=True, eq=False)
class Tokenized:
    """The tokens of one text, without special ones.

    Attributes:
        ids: `[tokens]`, int64.
        spans: `[tokens, 2]`, int64: the first character of each token, and the one after its last.
    """

    ids: IntArray
    spans: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The metadata of a response.

    Attributes:
        usage: Token counts.
        timings_ms: The milliseconds of each stage.
        warnings: The texts that were truncated.
        request_id: The id of the request in the service's log.
        vector_space: The id of the vector space of each kind. Only vectors with the same id may be
            compared.
    """

    model_name: str
    usage: dict[str, int]
    timings_ms: dict[str, float]
    warnings: list[dict[str, Any]]
    request_id: str | None
    vector_space: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embeddings(Report):
    """The vectors of texts, in their order; kinds that were not requested are None.

    Arrays are read-only. `dense` and `colbert` have the type of `output_dtype`: `float32` (also for
    bfloat16, whose values it holds exactly), `float16`, `int8` (also for binary) or `uint8` (also
    for ubinary).

    Attributes:
        dense: `[texts, width]`.
        dense_scale: `[texts]` float32, for int8 and uint8.
        sparse: A sparse vector for each text.
        colbert: `[vectors, width]` for each text.
        colbert_scale: `[vectors]` float32 for each text, for int8 and uint8.
        muvera: `[texts, 10240]` float32.
        tokens: The tokens of each text, with `return_tokens`.
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
    """Passages by descending score.

    Attributes:
        indices: `[passages]` int64: the index of each passage in the request.
        scores: `[passages]` float32.
        passages: The texts, in the same order.
        parts: The scores `dense`, `sparse` and `colbert`, each `[passages]` float32, of late
            interaction; else None.
    """

    indices: npt.NDArray[np.int64]
    scores: FloatArray
    passages: list[str]
    parts: dict[str, FloatArray] | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """The state of the service.

    Attributes:
        status: `healthy`, `loading`, `draining` or `unhealthy`.
        reason: The reason for a status other than `healthy`.
        details: The whole response of /health.
    """

    status: str
    reason: str | None
    details: dict[str, Any] = field(repr=False)

    @property
    def ready(self) -> bool:
        """Whether the service accepts requests."""
        return self.status == "healthy"


def read_embeddings(
    response: httpx.Response, texts: Sequence[str], options: Mapping[str, Any]
) -> Embeddings:
    """Parse the vectors of `texts`; raise `SmartEmbedderError` if the response does not fit."""
    safetensors.check_media_type(response)
    try:
        tensors, metadata = safetensors.read(response.content)
        check_tensors(tensors, options, len(texts), metadata["output_dtype"])
        embeddings = Embeddings(
            **split_by_text(tensors),
            output_dtype=metadata["output_dtype"],
            **_read_strings(metadata, *_MODEL_NAMES),
            **_read_report(response, metadata, len(texts), options),
        )
        tokens = metadata.get("tokens")
        return embeddings if tokens is None else _add_tokens(embeddings, tokens, len(texts))
    except MALFORMED as error:
        raise unexpected_answer(response, f"the vectors cannot be read: {error!r}") from error


def read_vector_space(response: httpx.Response, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the id of the vector space of each kind, from a header.

    Raises `SmartEmbedderError` if the header is missing although `if_vector_space` was sent.
    """
    ids = [id_.strip() for id_ in response.headers.get("vector-space", "").split(",")]
    spaces = {id_.partition("-")[0]: id_ for id_ in ids if id_}
    if options.get("if_vector_space") and not spaces:
        raise unexpected_answer(response, "the header Vector-Space is missing")
    return spaces


def split_by_text(tensors: Mapping[str, Array]) -> dict[str, Any]:
    """Return the fields of `Embeddings`, as views; sparse and ColBERT vectors as a list."""
    arrays = ("dense", "dense_scale", "muvera")
    vectors: dict[str, Any] = {name: tensors[name] for name in arrays if name in tensors}

    def split(name: str, kind: str) -> list[Array]:
        return np.split(tensors[name], tensors[f"{kind}_offsets"][1:-1])

    if "sparse_offsets" in tensors:
        parts = (split(name, "sparse") for name in ("sparse_indices", "sparse_values"))
        vectors["sparse"] = [SparseVector(*pair) for pair in zip(*parts, strict=True)]
    for name in ("colbert", "colbert_scale"):
        if name in tensors:
            vectors[name] = split(name, "colbert")
    return vectors


def _add_tokens(embeddings: Embeddings, tokens: Any, count: int) -> Embeddings:
    no_counts = [None] * count
    sparse, colbert = embeddings.sparse, embeddings.colbert
    sparse_counts = no_counts if sparse is None else [len(vector.values) for vector in sparse]
    colbert_counts = no_counts if colbert is None else [len(vectors) for vectors in colbert]
    rows = zip(_check_list(tokens, count), sparse_counts, colbert_counts, strict=True)
    return replace(embeddings, tokens=[read_tokens(entry, counts) for entry, *counts in rows])


def read_tokens(entry: Any, counts: Sequence[int | None]) -> TokenStrings:
    """Parse the tokens of one text; raise one of `MALFORMED` unless their numbers are `counts`."""
    kinds = (entry["sparse"], entry["colbert"])
    for strings, count in zip(kinds, counts, strict=True):
        # MUVERA returns ColBERT's tokens without its vectors.
        if strings is None and count is None:
            continue
        length = len(strings) if count is None else count
        if not all(isinstance(string, str) for string in _check_list(strings, length)):
            raise TypeError("tokens that are no strings")
    return TokenStrings(*kinds)


def join_embeddings(parts: Sequence[Embeddings], sizes: Sequence[int]) -> Embeddings:
    """Join the results for the parts of a list; `sizes` are their numbers of texts.

    The result has the `request_id` of the last part. Raises `SmartEmbedderError` if the model of
    the service has changed between two parts.
    """
    if len(parts) == 1:
        return parts[0]
    detail = "the service has changed its model between two requests for parts of a list"
    changed = SmartEmbedderError(detail, UNEXPECTED_ANSWER, httpx.codes.OK)
    names = (*_MODEL_NAMES, "vector_space")
    if any(getattr(part, name) != getattr(parts[0], name) for part in parts for name in names):
        raise changed
    joined: dict[str, Any] = {}
    for name in VECTOR_FIELDS:
        fields = [getattr(part, name) for part in parts if getattr(part, name) is not None]
        if fields and len(fields) < len(parts):
            raise changed
        if not fields or isinstance(fields[0], list):
            joined[name] = list(chain.from_iterable(fields)) if fields else None
            continue
        if len({array.shape[1:] for array in fields}) > 1:
            raise changed
        joined[name] = np.concatenate(fields)
        joined[name].flags.writeable = False
    return replace(
        parts[-1],
        **joined,
        usage=_sum_values([part.usage for part in parts]),
        timings_ms=_sum_values([part.timings_ms for part in parts]),
        warnings=[
            _shift_warning(warning, start)
            for part, start in zip(parts, accumulate(sizes, initial=0), strict=False)
            for warning in part.warnings
        ],
    )


def _sum_values(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: sum(count.get(name, 0) for count in counts) for name in counts[0]}


def _shift_warning(warning: dict[str, Any], start: int) -> dict[str, Any]:
    """Change a warning about a text of a part to the text's index in the whole list."""
    target = warning["target"]
    index = target["index"] + start
    pointer = f"/sentences/{index}"
    message = warning["message"].replace(f"/sentences/{target['index']} ", f"{pointer} ", 1)
    return warning | {"message": message, "target": target | {"index": index, "pointer": pointer}}


def read_ranking(
    response: httpx.Response, passages: Sequence[str], options: Mapping[str, Any]
) -> Ranking:
    """Parse the ranked `passages`; raise `SmartEmbedderError` if the response does not fit."""
    check_status(response)
    try:
        body = response.json()
        results = _check_list(body["results"], len(passages))
        indices = [result["index"] for result in results]
        if sorted(indices) != list(range(len(passages))) or not all(
            type(index) is int for index in indices
        ):
            raise ValueError("its indices are not those of the passages, each once")
        if any(result["passage"] != passages[result["index"]] for result in results):
            raise ValueError("a passage that was not sent")
        scores = _read_scores([result["score"] for result in results])
        if (scores[1:] > scores[:-1]).any():
            raise ValueError("scores that do not fall")
        parts = [result.get("parts") or {} for result in results]
        names = sorted(parts[0])
        if any(sorted(part) != names for part in parts):
            raise ValueError("scores of other parts for each passage")
        return Ranking(
            indices=np.array(indices, np.int64),
            scores=scores,
            passages=[passages[index] for index in indices],
            parts={name: _read_scores([part[name] for part in parts]) for name in names} or None,
            **_read_report(response, body, len(passages), options),
        )
    except MALFORMED as error:
        raise unexpected_answer(response, f"the ranking cannot be read: {error!r}") from error


def _read_scores(numbers: Sequence[Any]) -> FloatArray:
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError("scores that are no numbers")
    scores = np.array(numbers, np.float64)
    if not (np.abs(scores) <= np.finfo(np.float32).max).all():
        raise ValueError("scores that are no numbers")
    return scores.astype(np.float32)


def read_tokenized(response: httpx.Response, texts: Sequence[str]) -> list[Tokenized]:
    """Parse the tokens of each text; raise `SmartEmbedderError` if the response does not fit."""
    check_status(response)
    try:
        rows = zip(_check_list(response.json(), len(texts)), texts, strict=True)
        return [_read_tokenized_text(tokens, text) for tokens, text in rows]
    except MALFORMED as error:
        raise unexpected_answer(response, f"the tokens cannot be read: {error!r}") from error


def _read_tokenized_text(tokens: Any, text: str) -> Tokenized:
    tokens = _check_list(tokens, len(tokens))
    rows = [(token["id"], token["start"], token["stop"]) for token in tokens]
    if any(type(number) is not int for row in rows for number in row):
        raise TypeError("tokens without ids or spans")
    table = np.array(rows, np.int64).reshape(-1, 3)
    spans = table[:, 1:]
    if rows and not (spans.min() >= 0 and spans.max() <= len(text)):
        raise ValueError("tokens beyond their text")
    return Tokenized(table[:, 0], spans)


def read_health(response: httpx.Response) -> Health:
    """Parse a response of /health with any status; raise `SmartEmbedderError` for another one."""
    body = json_object(response)
    status, reason = body.get("status"), body.get("reason")
    if not isinstance(status, str) or not isinstance(reason, str | None):
        raise refusal(response)
    return Health(status, reason, body)


def _read_report(
    response: httpx.Response, body: Mapping[str, Any], count: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "vector_space": read_vector_space(response, options),
        **_read_strings(body, "model_name"),
        "usage": _check_numbers(body["usage"], int),
        "timings_ms": _check_numbers(body["timings_ms"], int, float),
        "warnings": _check_warnings(body["warnings"], count),
        "request_id": response.headers.get("x-request-id"),
    }


def _check_warnings(values: Any, count: int) -> list[dict[str, Any]]:
    """Return the warnings; raise one of `MALFORMED` unless each is about one of `count` texts."""
    warnings: list[dict[str, Any]] = _check_list(values, len(values))
    for warning in warnings:
        index = warning["target"]["index"]
        if not isinstance(warning["code"], str) or not isinstance(warning["message"], str):
            raise TypeError("a warning without a code or a sentence")
        if type(index) is not int or index not in range(count):
            raise ValueError(f"a warning about the text {index!r:.80}")
    return warnings


def _read_strings(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    strings = {name: body[name] for name in names}
    if not all(isinstance(string, str) for string in strings.values()):
        raise TypeError("a name that is no string")
    return strings


def _check_numbers(numbers: Any, *types: type) -> dict[str, Any]:
    if not isinstance(numbers, dict) or any(type(value) not in types for value in numbers.values()):
        raise TypeError("counts or times that are no numbers")
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError("counts or times that are not finite")
    return numbers


def _check_list(values: Any, length: int) -> list[Any]:
    if not isinstance(values, list) or len(values) != length:
        raise TypeError(f"a list of {length} was expected")
    return values
