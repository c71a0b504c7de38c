"""What each format of an answer costs: bytes, the server's processor time, the client's time.

    python -m benchmarks.formats

renders an answer of 64 texts of 256 tokens with dense, sparse and ColBERT vectors as wide as
bge-m3's, made of random numbers, and reads it again with the libraries that a client would use. It
needs pyarrow, which requirements-cpu.txt brings along.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
import orjson
import pyarrow as pa
import safetensors

from smart_embedder.api.formats import arrow, binary
from smart_embedder.api.formats import vectors as json_answer
from smart_embedder.api.formats.vectors import EmbeddingAnswer
from smart_embedder.api.rendering import compress
from smart_embedder.engine.records import (
    EmbeddingResult,
    EmbedRequest,
    Outputs,
    SparseVector,
    TextEmbedding,
    Timings,
)
from smart_embedder.vectors import OutputDtype
from tools.table import markdown

_WIDTH = 1024
_WEIGHTS = 150
_TEXTS, _TOKENS, _RUNS = 64, 256, 3
_ALL = Outputs(dense=True, sparse=True, colbert=True)

Chunks = Iterable[bytes | memoryview]
Format = tuple[Callable[[EmbeddingAnswer], Chunks], Callable[[Any], Any]]


def answer_of(texts: int, tokens: int, dtype: OutputDtype) -> EmbeddingAnswer:
    """An answer with random vectors of unit length."""
    random = np.random.default_rng(0)
    embeddings = [_embedding(random, tokens) for _ in range(texts)]
    result = EmbeddingResult(embeddings, [], texts * tokens, Timings(0, 0, 0, 0))
    request = EmbedRequest(["text"] * texts, _ALL, output_dtype=dtype)
    return EmbeddingAnswer(request, result, {"model_name": "bge-m3"})


def _embedding(random: np.random.Generator, tokens: int) -> TextEmbedding:
    vectors = random.standard_normal((tokens, _WIDTH), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    indices = np.sort(random.choice(250_000, _WEIGHTS, replace=False))
    weights = random.random(_WEIGHTS, np.float32)
    return TextEmbedding(vectors[0], SparseVector(indices, weights), vectors[1:])


def render_json(answer: EmbeddingAnswer, *, as_base64: bool = False) -> Iterator[bytes]:
    """The answer in JSON, its sparse vectors by id."""
    return json_answer.render(answer, sparse_as_indices=False, as_base64=as_base64)


def read_json(content: bytes) -> Any:
    """The ColBERT vectors of each text, as a client reads them that wants arrays."""
    data = orjson.loads(content)["data"]
    return [np.array(item["embeddings"]["colbert"], np.float32) for item in data]


FORMATS: dict[str, Format] = {
    "JSON": (render_json, read_json),
    "JSON, gzip": (lambda answer: compress(render_json(answer), "gzip"), len),
    "JSON, zstd": (lambda answer: compress(render_json(answer), "zstd"), len),
    "JSON, base64": (lambda answer: render_json(answer, as_base64=True), orjson.loads),
    "MessagePack": (binary.render_msgpack, msgpack.unpackb),
    "Arrow": (arrow.render, lambda content: pa.ipc.open_stream(content).read_all()),
    "safetensors": (binary.render_safetensors, safetensors.deserialize),
}


def measure(answer: EmbeddingAnswer, form: Format) -> tuple[int, float, float]:
    """Bytes, and the medians of the seconds to make and to read them."""
    render, read = form
    runs = []
    for _ in range(_RUNS):
        began = time.process_time()
        chunks = list(render(answer))
        made = time.process_time() - began
        content = b"".join(chunks)
        began = time.perf_counter()
        read(content)
        runs.append((len(content), made, time.perf_counter() - began))
    sizes, *seconds = zip(*runs, strict=True)
    return sizes[0], *map(statistics.median, seconds)


def table() -> tuple[Sequence[str], list[list[str]]]:
    """The heads, and a row for each format."""
    dtypes: dict[str, tuple[OutputDtype, ...]] = dict.fromkeys(FORMATS, ("float32",))
    dtypes["Arrow"] = ("float32", "float16", "int8", "ubinary")
    rows = []
    for name, form in FORMATS.items():
        for dtype in dtypes[name]:
            answer = answer_of(_TEXTS, _TOKENS, dtype)
            size, made, taken = measure(answer, form)
            read = "" if form[1] is len else f"{1000 * taken:.0f}"
            rows.append([name, dtype, f"{size / 1e6:.1f}", f"{1000 * made:.0f}", read])
    return ("format", "numbers", "MB", "server, ms", "client, ms"), rows


if __name__ == "__main__":
    print(markdown(*table()))
