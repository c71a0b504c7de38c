"""The results of a client's methods, parsed from responses.

A response is refused unless its vectors, scores and tokens are those of the texts that were sent.
"""

from collections.abc import Mapping, Sequence
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

# The fields of `Embeddings` that have an entry for each text.
VECTOR_FIELDS = ("dense", "dense_scale", "sparse", "colbert", "colbert_scale", "muvera", "tokens")
_MODEL_NAMES = ("dense_model_name", "sparse_model_name", "colbert_model_name")
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


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
        dtype, tokens = metadata["output_dtype"], metadata.get("tokens")
        if dtype != options.get("output_dtype", "float32"):
            raise ValueError(f"numbers of the type {dtype!r:.80}")
        vectors = _split_by_text(tensors, len(texts))
        for kind in ("dense", "sparse", "colbert", "muvera"):
            required = options.get("muvera" if kind == "muvera" else f"return_{kind}")
            if required and texts and kind not in vectors:
                raise ValueError(f"no {kind} vectors")
        if tokens is not None:
            vectors["tokens"] = [
                TokenStrings(entry["sparse"], entry["colbert"])
                for entry in _check_list(tokens, len(texts))
            ]
        return Embeddings(
            **vectors,
            output_dtype=dtype,
            **{name: metadata[name] for name in _MODEL_NAMES},
            **_read_report(response, metadata, options),
        )
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


def _split_by_text(tensors: Mapping[str, Array], count: int) -> dict[str, Any]:
    """Return the fields of `Embeddings` as views; raise one of `MALFORMED` if the sizes differ."""
    vectors: dict[str, Any] = {}
    for name in ("dense", "dense_scale", "muvera"):
        if name in tensors:
            vectors[name] = _check_rows(tensors, name, count)
    if "sparse_offsets" in tensors:
        parts = [_split(tensors, name, count) for name in ("sparse_indices", "sparse_values")]
        vectors["sparse"] = [SparseVector(*pair) for pair in zip(*parts, strict=True)]
    for name in ("colbert", "colbert_scale"):
        if name in tensors:
            vectors[name] = _split(tensors, name, count)
    return vectors


def _split(tensors: Mapping[str, Array], name: str, count: int) -> list[Array]:
    """Divide the rows of all texts by `sparse_offsets` or `colbert_offsets`."""
    offsets = tensors[f"{name.partition('_')[0]}_offsets"]
    rows = _check_rows(tensors, name, int(offsets[-1]))
    if len(offsets) != count + 1 or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"offsets that do not divide {name}")
    return np.split(rows, offsets[1:-1])


def _check_rows(tensors: Mapping[str, Array], name: str, count: int) -> Array:
    array = tensors[name]
    if len(array) != count:
        raise ValueError(f"{name} of {len(array)} rows in place of {count}")
    # Minimum and maximum are NaN or infinite if any number is; `isfinite(array)` would allocate.
    if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
        raise ValueError(f"{name} with numbers that are not finite")
    return array


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
        if sorted(indices) != list(range(len(passages))):
            raise ValueError("its indices are not those of the passages, each once")
        parts = [result.get("parts") or {} for result in results]
        return Ranking(
            indices=np.array(indices, np.int64),
            scores=_read_scores([result["score"] for result in results]),
            passages=[passages[index] for index in indices],
            parts={
                name: _read_scores([part[name] for part in parts])
                for name in (parts[0] if parts else ())
            }
            or None,
            **_read_report(response, body, options),
        )
    except MALFORMED as error:
        raise unexpected_answer(response, f"the ranking cannot be read: {error!r}") from error


def _read_scores(numbers: Sequence[float]) -> FloatArray:
    scores = np.array(numbers, np.float64)
    if not (np.abs(scores) <= np.finfo(np.float32).max).all():
        raise ValueError("scores that are not finite")
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
    rows = [(token["id"], token["start"], token["stop"]) for token in tokens]
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
    response: httpx.Response, body: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "vector_space": read_vector_space(response, options),
        "model_name": body["model_name"],
        "usage": body["usage"],
        "timings_ms": body["timings_ms"],
        "warnings": body["warnings"],
        "request_id": response.headers.get("x-request-id"),
    }


def _check_list(values: Any, length: int) -> list[Any]:
    if not isinstance(values, list) or len(values) != length:
        raise TypeError(f"a list of {length} was expected")
    return values
