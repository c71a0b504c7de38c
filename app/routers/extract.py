"""POST /extract: find spans in texts, such as names of people and places."""

from functools import partial

from starlette.responses import Response

from app.answers import render_spans
from app.context import EXTRACT
from app.handler import Call, extract
from app.response_schemas import ExtractResponse
from app.routing import Router
from app.schemas import ExtractBody
from smart_embedder.requests import ExtractRequest

router = Router(groups=({"name": "extract", "description": "Spans of texts, with labels."},))


@router.work(EXTRACT.path, ExtractResponse, summary="Find spans in texts", tags=["extract"])
async def extract_spans(body: ExtractBody, call: Call) -> Response:
    """Find the spans that a model with the task extract labels, such as names of people."""
    model = call.service.catalogue.extractor(body.model)
    request = ExtractRequest(body.texts, body.labels, body.threshold, body.aggregation)
    call.context.if_vector_space = body.if_vector_space or call.context.if_vector_space
    result = await extract(call, request, model)
    about = {"model_name": model.name, "vector_space": call.context.vector_spaces}
    return await call.render(partial(render_spans, result, about))
