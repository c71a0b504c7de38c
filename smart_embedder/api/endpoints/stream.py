"""POST /embeddings/stream: a text in each line of the body, a record for each in the answer.

The options are those of /embeddings/, in the query.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from urllib.parse import parse_qsl

from fastapi import Request
from starlette.responses import Response

from smart_embedder.api.body import check_encoding, content_type_of, validate
from smart_embedder.api.catalogue import name_of
from smart_embedder.api.context import EMBEDDING_STREAM, context_of
from smart_embedder.api.formats.records import (
    ARROW,
    NDJSON,
    WRITERS,
    RecordOptions,
    RecordWriter,
    media_type_of,
)
from smart_embedder.api.handler import Call, Router, ServiceDep, urgency_of
from smart_embedder.api.negotiation import encoding_of
from smart_embedder.api.openapi import BEARER, describe_stream, error_responses
from smart_embedder.api.schemas import EmbeddingFields
from smart_embedder.api.stream.answer import (
    PIECES,
    PieceEmbedder,
    PieceSize,
    StreamPlan,
    StreamResponse,
)
from smart_embedder.api.stream.arrow_lines import ArrowReader
from smart_embedder.api.stream.lines import LineReader, NdjsonReader, StreamLine
from smart_embedder.api.work import model_names, native_request
from smart_embedder.engine.checks import check_embedding
from smart_embedder.engine.requests.embedding import vector_bytes
from smart_embedder.errors import InvalidRequestError, UnsupportedMediaError

BULK_URGENCY = 7
_MAX_LINES = 512
_MAX_OPTIONS = 100

_READERS: Mapping[str, Callable[[int], LineReader]] = {
    NDJSON: NdjsonReader,
    ARROW: ArrowReader,
    "application/ndjson": NdjsonReader,
    "application/jsonl": NdjsonReader,
    "application/x-jsonlines": NdjsonReader,
}

router = Router(tags=["embeddings"], dependencies=[BEARER])


@router.work(
    EMBEDDING_STREAM.path,
    EMBEDDING_STREAM,
    summary="Embed a stream of texts",
    response_class=Response,
    responses=error_responses(400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503),
    openapi_extra=describe_stream(EmbeddingFields, StreamLine, [NDJSON, ARROW], [*WRITERS]),
)
async def stream_embeddings(request: Request, service: ServiceDep) -> Response:
    """A record for each line, in order and as soon as it is ready.

    The body may be as long as it likes: it is read as fast as its vectors are computed and taken.
    A bad line is answered with an error in its place, and the rest goes on.
    """
    fields = _options(context_of(request.scope).query)
    check_encoding(request.headers)
    read_type = content_type_of(request.headers)
    if read_type not in _READERS:
        raise UnsupportedMediaError(
            f"a stream is read as {NDJSON} or {ARROW}: send one of them as Content-Type"
        )
    lines = _READERS[read_type](service.settings.max_body_bytes)
    media_type = media_type_of(request, tuple(WRITERS))
    model = service.catalogue.embedder(fields.model) if fields.model else None
    # Only while the stream is set up: each piece leases the model by itself.
    async with service.engine.lease(name_of(model)) as models:
        binary = [each for each in WRITERS if each != NDJSON]
        embedding = native_request(fields, [], models, media_type, binary)
    check_embedding(models, embedding)
    call, urgency = Call(request, service), urgency_of(request, BULK_URGENCY)
    client = call.context.client
    embedding = replace(embedding, urgency=urgency, client=client, model=name_of(model))
    of_token = vector_bytes(models.embedder, replace(embedding.needed, dense=False), [1])
    tokens = call.context.answer.allowed // PIECES // of_token
    # Nothing below keeps the models, which may be unloaded between two pieces.
    records = RecordOptions(
        embedding,
        model_names(models),
        (fields.dimensions or models.dense_model.dense_width, models.embedder.colbert_width),
        sparse_as_indices=fields.sparse_as_indices,
        as_base64=fields.encoding == "base64",
    )

    def make_writer() -> RecordWriter:
        """When the beginning of the stream has been read, which tells the type of its ids."""
        integer_ids = isinstance(lines, ArrowReader) and lines.integer_ids
        return WRITERS[media_type](replace(records, integer_ids=integer_ids))

    plan = StreamPlan(
        lines,
        PieceEmbedder(service, embedding),
        embedding,
        make_writer,
        max_lines=min(_MAX_LINES, service.settings.max_sentences_per_request),
        size=PieceSize(max(1, min(models.max_batch_tokens, tokens))),
        media_type=media_type,
        encoding=encoding_of(request) if media_type == NDJSON else None,
    )
    return StreamResponse(call, plan)


def _options(query: bytes) -> EmbeddingFields:
    """The options in the query; raises `InvalidRequestError`, as for a body."""
    try:
        items = parse_qsl(query.decode("latin-1"), True, max_num_fields=_MAX_OPTIONS)
    except ValueError:
        raise InvalidRequestError(
            f"the query holds more than {_MAX_OPTIONS} options, and there are "
            f"{len(EmbeddingFields.model_fields)}: send each once"
        ) from None
    counts = Counter(name for name, _ in items)
    twice = next((name for name in EmbeddingFields.model_fields if counts[name] > 1), None)
    if twice is not None:
        raise InvalidRequestError(f"the option {twice} is given more than once: send it once")
    # In a query, numbers and booleans are strings.
    return validate(dict(items), EmbeddingFields, strict=False)
