"""SIE's API, as `sie-sdk` 0.10 calls it: vectors, scores and spans.

Bodies and responses are JSON or MessagePack, in which vectors are numpy arrays.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from starlette.responses import Response

from app.answers import (
    JSON,
    OPTIONS,
    ranked_scores,
    render_items,
    render_matrix,
    render_object,
    reserve_rendering_memory,
    timings_as_json,
    vectors_of,
)
from app.catalogue import ServedModel
from app.dialects.sie_schemas import (
    SIE,
    EncodeBody,
    EncodeOptions,
    EncodeParams,
    ExtractItems,
    ExtractOptions,
    ExtractParams,
    ScoreBody,
    SieError,
    SieItem,
    SieScores,
    SieSpans,
    SieText,
    SieVectors,
)
from app.handler import Call, embed, extract, find_embedder, rerank
from app.headers import read_preference
from app.message_pack import MESSAGE_PACK, pack
from app.routing import DECLARE_MODEL, Router
from app.service import Service
from smart_embedder.errors import InvalidRequestError
from smart_embedder.interface import Embedder, ModelState
from smart_embedder.requests import EmbedRequest, ExtractRequest, Outputs, RerankRequest
from smart_embedder.results import EmbeddingResult, ExtractionResult, FloatArray, RerankResult
from smart_embedder.vectors import OutputDtype, quantize

# Its client sends this header with every request.
SDK_HEADER = "x-sie-sdk-version"
_STATES = {"unloaded": "available", "loading": "loading", "ready": "loaded", "failed": "failed"}
# Its names for kinds of vectors, and for the results of other models.
_OUTPUTS = {
    "dense": "dense", "sparse": "sparse", "colbert": "multivector", "scores": "score",
    "spans": "json",
}  # fmt: skip
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_TAG = {"name": SIE.name, "description": "In JSON or MessagePack."}
_BELOW = ("/v1/encode/", "/v1/score/", "/v1/extract/")
router = Router(
    SIE, SieError, [_TAG], below=_BELOW, tags=[_TAG["name"]], dependencies=[DECLARE_MODEL]
)
_work = partial(router.work, responses={200: {"content": {MESSAGE_PACK: _BINARY}}})


@_work("/v1/encode/{model:path}", SieVectors, summary="Embed texts or pictures")
async def encode_items(body: EncodeBody, call: Call) -> Response:
    """Embed each item, as dense, sparse or one vector for each token."""
    params = body.params or EncodeParams()
    options, types = params.options or EncodeOptions(), params.output_types or ["dense"]
    model = find_embedder(call)
    dense_model = (await call.lease(model)).dense_model
    side: Literal["query", "document"] = "query" if options.is_query else "document"
    replaces_dense = options.muvera is not None and "dense" in types
    wants_dense = "dense" in types and not replaces_dense
    if options.normalize is False and (dense_model.normalizes or not wants_dense):
        raise InvalidRequestError(
            f"the option normalize has no effect on these vectors of {dense_model.name}"
        )
    request = EmbedRequest(
        [item.input for item in body.items],
        Outputs(wants_dense, "sparse" in types, "multivector" in types),
        normalize_dense=options.normalize is not False,
        input_type=side if params.instruction is None else None,
        prompt=_make_prompt(dense_model, params.instruction, side),
        muvera=side if replaces_dense else None,
    )
    result = await embed(call, request, field="items", model=model)
    dtype: OutputDtype = params.output_dtype or "float32"
    rendered = replace(request, output_dtype=dtype)
    reserve_rendering_memory(result.embeddings, rendered, call.context.answer, at_once=True)
    return await _respond(call, model, result, partial(_vectors, body, result, request, dtype))


def _make_prompt(model: Embedder, instruction: str | None, side: str) -> str | None:
    """Put the instruction in the place that the model's own prompt for queries has for it."""
    if instruction is None:
        return None
    prompt = model.prompts.get("query", "")
    if side == "query" and prompt.startswith("Instruct: "):
        return f"Instruct: {instruction}{prompt[prompt.rfind(chr(10)) :]}"
    return f"{instruction} "


def _vectors(
    body: EncodeBody, result: EmbeddingResult, request: EmbedRequest, dtype: OutputDtype
) -> dict[str, Any]:
    items = []
    # Weights have no fewer bits.
    weights_dtype: OutputDtype = "float16" if dtype == "float16" else "float32"
    for item, embedding in zip(body.items, result.embeddings, strict=True):
        vectors = vectors_of(embedding, request)
        encoded: dict[str, Any] = {} if item.id is None else {"id": item.id}
        dense = vectors.muvera if vectors.dense is None else vectors.dense.values
        if dense is not None:
            encoded["dense"] = {"dims": len(dense)} | _convert(dense, dtype)
        if vectors.sparse is not None:
            indices = vectors.sparse.indices.astype(np.int32)
            weights = _convert(vectors.sparse.values, weights_dtype)
            encoded["sparse"] = {"dims": None, "indices": indices} | weights
        if vectors.colbert is not None:
            tokens, width = vectors.colbert.values.shape
            shape = {"token_dims": width, "num_tokens": tokens}
            encoded["multivector"] = shape | _convert(vectors.colbert.values, dtype)
        items.append(encoded)
    timings = timings_as_json(result.timings)
    timing = {f"{stage}_ms": timings[stage] for stage in ("total", "queue", "inference")}
    return {"items": items, "timing": timing | {"tokenization_ms": timings["tokenize"]}}


def _convert(vectors: FloatArray, dtype: OutputDtype) -> dict[str, Any]:
    """Return the type and the numbers of vectors; both names of one bit mean packed bits."""
    values: npt.NDArray[Any]
    if dtype == "uint8":  # From the smallest number of a vector to its largest.
        low, high = vectors.min(-1, keepdims=True), vectors.max(-1, keepdims=True)
        values = np.rint((vectors - low) / np.maximum(high - low, 1e-12) * 255).astype(np.uint8)
    else:
        values = quantize(vectors, "ubinary" if dtype == "binary" else dtype).values
    return {"dtype": "binary" if dtype == "ubinary" else dtype, "values": values}


@_work("/v1/score/{model:path}", SieScores, summary="Score texts for a query")
async def score_items(body: ScoreBody, call: Call) -> Response:
    """Score each item from 0 to 1, the best first."""
    model = call.service.catalogue.reranker(call.path_params["model"])
    request = RerankRequest(
        body.query.text,
        [item.input for item in body.items],
        normalize=True,
        instruction=body.instruction,
    )
    result = await rerank(call, request, model, "items")
    scores = [
        {"item_id": _name(body.items, index), "score": score, "rank": rank}
        for rank, (index, score) in enumerate(ranked_scores(result))
    ]
    answer = {"query_id": body.query.id, "scores": scores}
    return await _respond(call, model, result, lambda: answer)


def _name(items: Sequence[SieItem | SieText], index: int) -> str:
    name = items[index].id
    return f"item-{index}" if name is None else name


@_work("/v1/extract/{model:path}", SieSpans, summary="Find spans in texts")
async def extract_items(body: ExtractItems, call: Call) -> Response:
    """Find the spans that a model with the task extract labels."""
    params = body.params or ExtractParams()
    options = params.options or ExtractOptions()
    model = call.service.catalogue.extractor(call.path_params["model"])
    texts = [item.text for item in body.items]
    request = ExtractRequest(texts, params.labels, options.threshold)
    result = await extract(call, request, model, "items")
    return await _respond(call, model, result, partial(_spans, body, result))


def _spans(body: ExtractItems, result: ExtractionResult) -> dict[str, Any]:
    others = dict.fromkeys(("relations", "classifications", "objects"), ())
    items = [
        {"id": _name(body.items, index), "entities": list(map(asdict, spans)), **others}
        for index, spans in enumerate(result.spans)
    ]
    return {"items": items}


async def _respond(
    call: Call,
    model: ServedModel | None,
    result: EmbeddingResult | RerankResult | ExtractionResult,
    make: Callable[[], dict[str, Any]],
) -> Response:
    """Render what `make` returns, as MessagePack unless only JSON is accepted, as there."""
    about = {"model": model and model.name, "usage": {"input_tokens": result.tokens}}
    accept = read_preference(call.headers, "accept").lower()
    if JSON in accept and MESSAGE_PACK not in accept:
        return await call.render(lambda: _as_json(make() | about))
    return await call.render(lambda: pack(make() | about), MESSAGE_PACK)


def _as_json(value: Any) -> Iterator[bytes]:
    """Render a value with arrays as JSON, in chunks."""
    match value:
        case dict():
            yield from render_object({name: _as_json(item) for name, item in value.items()})
        case list():
            yield from render_items(map(_as_json, value))
        case np.ndarray(ndim=2):
            yield from render_matrix(value)
        case _:
            yield orjson.dumps(value, option=OPTIONS)


def describe_model(model: ServedModel, service: Service) -> dict[str, Any]:
    """Describe a model as in SIE's /v1/models; what it makes is known while it is loaded."""
    status = service.status_of(model)
    is_loaded, makes = status.state is ModelState.READY, status.makes
    kinds = makes.kinds if makes else ()
    loaded = getattr(service.engine.loaded(model.name), model.role.value) if is_loaded else None
    return {
        "name": model.name,
        "inputs": ["text", "image"] if makes and makes.reads_images else ["text"],
        "outputs": [_OUTPUTS[kind] for kind in kinds],
        "dims": {
            _OUTPUTS[kind]: getattr(loaded, f"{kind}_width")
            for kind in ("dense", "colbert")
            if kind in kinds
        },
        "loaded": is_loaded,
        "state": _STATES[status.state.value],
        "max_sequence_length": makes.max_length if makes else None,
        "revision": model.revision,
    }
