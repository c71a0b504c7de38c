"""The results of a client's methods, and functions that read them from the service's answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from smart_embedder_client import safetensors
from smart_embedder_client.errors import (
    MALFORMED,
    check_safetensors,
    check_status,
    json_object,
    refusal,
    unexpected_answer,
)
from smart_embedder_client.safetensors import Array

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """Lexical weights: `values[i]`, float32, is that of the token `indices[i]`, uint32."""

    indices: npt.NDArray[np.uint32]
    values: FloatArray


@dataclass(frozen=True, slots=True)
class TokenStrings:
    """The tokens of one text: a string for each sparse weight, and for each ColBERT vector."""

    sparse: list[str] | None
    colbert: list[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The facts about a request in its answer.

    `usage` counts tokens, `timings_ms` has milliseconds, `warnings` says which texts were cut.
    `request_id` finds the request in the service's log.
    """

    model_name: str
    usage: dict[str, int]
    timings_ms: dict[str, float]
    warnings: list[dict[str, Any]]
    request_id: str | None


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


def read_embeddings(response: httpx.Response) -> Embeddings:
    """An answer in safetensors; raises `SmartEmbedderError` for any other one."""
    check_safetensors(response)
    try:
        tensors, metadata = safetensors.read(response.content)
        return _embeddings(response, tensors, json.loads(metadata[safetensors.METADATA_KEY]))
    except MALFORMED as error:
        raise unexpected_answer(response, f"the vectors cannot be read: {error!r}") from error


def _embeddings(
    response: httpx.Response, tensors: Mapping[str, Array], told: Mapping[str, Any]
) -> Embeddings:
    colbert = tensors.get("colbert_offsets")
    tokens = told.get("tokens")
    return Embeddings(
        dense=tensors.get("dense"),
        dense_scale=tensors.get("dense_scale"),
        sparse=_sparse(tensors) if "sparse_offsets" in tensors else None,
        colbert=_split(tensors.get("colbert"), colbert),
        colbert_scale=_split(tensors.get("colbert_scale"), colbert),
        muvera=tensors.get("muvera"),
        tokens=None if tokens is None else [TokenStrings(**each) for each in tokens],
        output_dtype=told["output_dtype"],
        dense_model_name=told["dense_model_name"],
        sparse_model_name=told["sparse_model_name"],
        colbert_model_name=told["colbert_model_name"],
        **_report(response, told),
    )


def _sparse(tensors: Mapping[str, Array]) -> list[SparseVector]:
    offsets = tensors["sparse_offsets"]
    indices = _split(tensors["sparse_indices"], offsets) or []
    values = _split(tensors["sparse_values"], offsets) or []
    return [SparseVector(*pair) for pair in zip(indices, values, strict=True)]


def _split(joined: Array | None, offsets: Array | None) -> list[Array] | None:
    """The part of each text."""
    if joined is None or offsets is None:
        return None
    return np.split(joined, offsets[1:-1])


def read_ranking(response: httpx.Response) -> Ranking:
    """An answer of /rerank; raises `SmartEmbedderError` for any other one."""
    check_status(response)
    try:
        told = response.json()
        return _ranking(response, told["results"], told)
    except MALFORMED as error:
        raise unexpected_answer(response, f"the ranking cannot be read: {error!r}") from error


def _ranking(
    response: httpx.Response, results: Sequence[Mapping[str, Any]], told: Mapping[str, Any]
) -> Ranking:
    parts = [each["parts"] for each in results if each.get("parts")]
    names = parts[0] if parts else ()
    return Ranking(
        indices=np.array([each["index"] for each in results], np.int64),
        scores=np.array([each["score"] for each in results], np.float32),
        passages=[each["passage"] for each in results],
        parts={name: np.array([each[name] for each in parts], np.float32) for name in names}
        or None,
        **_report(response, told),
    )


def read_counts(response: httpx.Response) -> list[int]:
    """An answer of /tokenize; raises `SmartEmbedderError` for any other one."""
    check_status(response)
    try:
        return [len(tokens) for tokens in response.json()]
    except MALFORMED as error:
        raise unexpected_answer(response, f"the tokens cannot be read: {error!r}") from error


def read_health(response: httpx.Response) -> Health:
    """An answer of /health, whatever it says; raises `SmartEmbedderError` for any other one."""
    told = json_object(response)
    if not isinstance(told.get("status"), str):
        raise refusal(response)
    return Health(told["status"], told.get("reason"), told)


def _report(response: httpx.Response, told: Mapping[str, Any]) -> dict[str, Any]:
    names = ("model_name", "usage", "timings_ms", "warnings")
    return {name: told[name] for name in names} | {
        "request_id": response.headers.get("x-request-id")
    }
