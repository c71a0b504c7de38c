"""embedding-server's /api/v1/embed: TEI's request, and a response with usage and timings.

That server has no releases.
"""

from collections.abc import Iterator
from functools import partial

from pydantic import BaseModel
from starlette.responses import Response

from app.answers import render_list, render_object, usage_as_json
from app.context import Endpoint
from app.dialects import tei, tei_schemas
from app.handler import Call
from app.response_schemas import Usage
from app.routing import Router
from smart_embedder.results import EmbeddingResult

_TAG = {"name": "embedding-server"}

# Errors have TEI's form.
router = Router(tei_schemas.TEI, tei_schemas.TeiError, [_TAG], tags=[_TAG["name"]])


class EmbeddingServerRequest(tei_schemas.TeiEmbedRequest):
    """Embed texts."""

    endpoint = Endpoint("/api/v1/embed")


class IndexedVector(BaseModel):
    """The vector of one text."""

    embedding: list[float]
    index: int


class StageTimes(BaseModel):
    """Duration of each stage, such as `120µs` or `2.5ms`."""

    tokenization: str
    queue: str
    inference: str


class EmbeddingServerResponse(BaseModel):
    """Vectors in the order of the request."""

    data: list[IndexedVector]
    usage: Usage
    timings: StageTimes


@router.work("/api/v1/embed", EmbeddingServerResponse, summary="Embed texts")
async def embed_inputs(body: EmbeddingServerRequest, call: Call) -> Response:
    """Embed each text as one dense vector. Errors are text-embeddings-inference's."""
    result = await tei.compute_dense(body, call)
    return await call.render(partial(_render, result))


def _render(result: EmbeddingResult) -> Iterator[bytes]:
    timings = result.timings
    vectors = (
        {"embedding": embedding.dense, "index": index}
        for index, embedding in enumerate(result.embeddings)
    )
    return render_object(
        {
            "data": render_list(vectors),
            "usage": usage_as_json(result.tokens),
            "timings": {
                "tokenization": _format_duration(timings.tokenize),
                "queue": _format_duration(timings.queue),
                "inference": _format_duration(timings.inference),
            },
        }
    )


def _format_duration(seconds: float) -> str:
    """Format a duration with three digits, in the largest unit of which it has at least one."""
    units = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
    scale, unit = next(((scale, unit) for scale, unit in units if seconds >= scale), units[-1])
    return f"{seconds / scale:.3g}{unit}"
