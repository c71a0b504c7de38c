"""Requests for spans: label the tokens of whole texts, and combine them into spans."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np

from smart_embedder.errors import EmptyInputError, InvalidRequestError
from smart_embedder.interface import Extractor, LoadedModels
from smart_embedder.interrupts import stop_if_given_up
from smart_embedder.requests import ExtractRequest, Outputs
from smart_embedder.results import ExtractionResult, FloatArray, Span
from smart_embedder.scheduling.admission import Admission, ConcurrencyLimit
from smart_embedder.scheduling.job import Job, timings_of
from smart_embedder.tokens import TextWindows

# The objects of a span and its JSON, without its text; and a character of the text.
_SPAN_BYTES, _CHARACTER_BYTES = 512, 4
# The subject and the advice of an error about memory.
_MEMORY_ERROR_TEXTS = "the labels of all tokens of these texts", "send fewer texts or shorter ones"


class ExtractionPipeline:
    """Serves requests for spans. Each holds a permit of `waiting` until its last batch is taken."""

    def __init__(self, admission: Admission, waiting: ConcurrencyLimit) -> None:
        self._admission = admission
        self._waiting = waiting

    async def extract(self, models: LoadedModels, request: ExtractRequest) -> ExtractionResult:
        """Find the spans of each text.

        Raises `EmptyInputError` without texts, `InvalidRequestError` for labels or an aggregation
        that the model cannot use, and the `UnavailableError`s and errors of forwards of
        `EngineCore.embed`.
        """
        if not request.texts:
            raise EmptyInputError("there are no texts to read")
        model = models.extractor
        if model is None:
            raise InvalidRequestError(f"the model {models.embedder.name} finds no spans of texts")
        model.check_options(request)
        if request.threshold is None:
            request = replace(request, threshold=model.default_threshold)
        started, token_bytes = time.perf_counter(), model.token_bytes(request)

        def check(tokens: int) -> None:
            request.answer.check(token_bytes * tokens, *_MEMORY_ERROR_TEXTS)

        async with self._admission.accepted.scope():
            async with self._waiting.hold(request.client):
                call = partial(model.tokenize_windows, request, check)
                read = [*request.texts, *(request.labels or ())]
                windows, stage = await self._admission.tokenize(model, call, read, request.client)
                size = token_bytes * sum(len(text.spans.ids) for text in windows)
                request.answer.reserve(size, *_MEMORY_ERROR_TEXTS)
                sequences = [sequence for text in windows for sequence in text.sequences]
                if request.charge is not None:
                    request.charge(sum(map(len, sequences)))
                jobs = [Job.of(request, model, sequences, Outputs())] if sequences else []
                await self._admission.submit(*jobs)
            results = chain(*await self._admission.results(*jobs))
            find = partial(_find_spans, model, request, windows, results, size)
            spans, size = await self._admission.threads.run(find, request.texts, request.client)
        request.answer.reserve(size, *_MEMORY_ERROR_TEXTS)
        timings = timings_of(started, tokenized=[stage], jobs=jobs)
        return ExtractionResult(spans, sum(map(len, sequences)), timings)


def _find_spans(
    model: Extractor,
    request: ExtractRequest,
    windows: list[TextWindows],
    results: Iterator[FloatArray],
    size: int,
) -> tuple[list[list[Span]], int]:
    """Find the spans of each text that the request asks for.

    `size` bytes are reserved already. Returns what the response needs, too.
    """
    found, labels = list[list[Span]](), None if request.labels is None else set(request.labels)
    # Rounded as scores are, so that the score of a span as a threshold keeps the span.
    threshold = np.float32(request.threshold or 0.0)
    for text, read in zip(request.texts, windows, strict=True):
        stop_if_given_up()
        of_text = list(islice(results, len(read.sequences)))
        found.append([])
        for span in model.find_spans(text, read, of_text, request):
            if span.score >= threshold and (labels is None or span.label in labels):
                size += _SPAN_BYTES + _CHARACTER_BYTES * len(span.text)
                request.answer.check(size, *_MEMORY_ERROR_TEXTS)
                found[-1].append(span)
    return found, size
