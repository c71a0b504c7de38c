"""What each format of an answer costs through a real server, with a checkpoint of any size.

    python -m benchmarks.formats_over_http --folder /path/to/a/checkpoint --dtype int8

sends 64 texts of 256 tokens for dense, sparse and ColBERT vectors, once in each format. The
server's seconds are those of the request without tokenising, waiting and computing: what it takes
to render the answer and to send it. The client's begin with the first byte and end with arrays.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgpack
import orjson
import pyarrow as pa
import safetensors

from benchmarks.formats import read_json
from tests.support.server import RunningServer, run_server

_STAGES = ("tokenize_ms", "queue_ms", "inference_ms")
_PATIENCE = 1200


@dataclass(frozen=True, slots=True)
class _Format:
    """A request's headers and options, and what a client makes of the answer."""

    media_type: str
    read: Callable[[bytes], Any]
    accept_encoding: str = "identity"
    encoding: str | None = None


FORMATS = {
    "JSON": _Format("application/json", read_json),
    "JSON, gzip": _Format("application/json", read_json, accept_encoding="gzip"),
    "JSON, base64": _Format("application/json", orjson.loads, encoding="base64"),
    "MessagePack": _Format("application/msgpack", msgpack.unpackb),
    "Arrow": _Format(
        "application/vnd.apache.arrow.stream",
        lambda content: pa.ipc.open_stream(content).read_all(),
    ),
    "safetensors": _Format("application/vnd.safetensors", safetensors.deserialize),
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="a checkpoint of bge-m3's shape")
    parser.add_argument("--dtype", default="auto", help="the number format, as DTYPE (%(default)s)")
    parser.add_argument("--texts", type=int, default=64, help="texts of a request (%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a text (%(default)s)")
    arguments = parser.parse_args()
    settings = {
        "EMBEDDING_MODEL": str(arguments.folder.resolve()),
        "DTYPE": arguments.dtype,
        "BGE_EMBED_MAX_LENGTH": str(arguments.tokens),
        "RERANKER_MODEL": "none",
        "REQUEST_TIMEOUT": str(_PATIENCE),
        "GPU_PROCESS_TIMEOUT": str(_PATIENCE - 1),
        "MAX_ANSWER_BYTES": str(2**31),
        "LOG_FORMAT": "json",
    }
    # Longer than the limit: each is cut to it.
    texts = [f"{number} " + "search " * 2 * arguments.tokens for number in range(arguments.texts)]
    print("| format | MB | server, ms | client, ms |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, run_server(Path(folder), **settings) as server:
        server.wait_until_healthy()
        for name, form in FORMATS.items():
            size, seconds = _ask(server, name, form, texts)
            rendered = _milliseconds_beside_stages(server, name)
            print(f"| {name} | {size / 1e6:.1f} | {rendered:.0f} | {1000 * seconds:.0f} |")


def _ask(server: RunningServer, name: str, form: _Format, texts: list[str]) -> tuple[int, float]:
    """The bytes of the answer, and the seconds from the first of them to arrays."""
    body = {"sentences": texts, "return_dense": True, "return_sparse": True, "return_colbert": True}
    if form.encoding is not None:
        body["encoding"] = form.encoding
    headers = {
        "Accept": form.media_type,
        "Accept-Encoding": form.accept_encoding,
        "X-Request-ID": _request_id(name),
    }
    url = f"{server.url}/embeddings/"
    with httpx2.stream("POST", url, json=body, headers=headers, timeout=_PATIENCE) as response:
        response.raise_for_status()
        began = time.perf_counter()
        form.read(response.read())
        return response.num_bytes_downloaded, time.perf_counter() - began


def _request_id(name: str) -> str:
    return name.replace(", ", "-")


def _milliseconds_beside_stages(server: RunningServer, name: str) -> float:
    wanted = f'"request_id":"{_request_id(name)}"'
    server.wait_for_line(wanted)
    line = json.loads(next(each for each in server.lines if wanted in each))
    computed: float = sum(line[stage] for stage in _STAGES)
    return float(line["ms"]) - computed


if __name__ == "__main__":
    main()
