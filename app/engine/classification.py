"""Classification requests: the logits of a classifier's labels for texts or pairs of texts."""

import time
from dataclasses import dataclass
from functools import partial

from app.engine.admission import Admission, timings_of
from app.engine.batcher import DEFAULT_URGENCY, weight_of
from app.engine.concurrency import ConcurrencyLimit
from app.engine.job import Job, Purpose
from app.engine.loaded_models import LoadedModels
from app.engine.model import Classifier
from app.engine.options import CUT_AT_END, TruncationOptions
from app.engine.truncation import refuse_truncation, text_truncations
from app.engine.types import ClassificationResult, Outputs, TokenizedText
from app.errors import InvalidRequestError, RerankerDisabledError


@dataclass(frozen=True, slots=True)
class ClassificationRequest:
    """Texts to classify, each alone or with a second one; other fields as in `RerankRequest`."""

    inputs: list[tuple[str, str | None]]
    truncation: TruncationOptions = CUT_AT_END
    urgency: int = DEFAULT_URGENCY
    client: str = ""
    model: str | None = None


class ClassificationPipeline:
    """Runs classification requests, within the same limits as rerank requests."""

    def __init__(self, admission: Admission, inside: ConcurrencyLimit, time_limit: float) -> None:
        self._admission = admission
        self._inside = inside
        self._time_limit = time_limit

    async def run(
        self, models: LoadedModels, request: ClassificationRequest
    ) -> ClassificationResult:
        """The logits of every input; raises `InvalidRequestError` where no model has labels."""
        model = _classifier_of(models)
        async with self._inside.hold(request.client):
            started = time.perf_counter()
            texts = [text for pair in request.inputs for text in pair if text is not None]
            call = partial(_tokenize, model, request)
            tokenized = await self._admission.tokenize(model, call, texts, request.client)
            side = request.truncation.side
            truncations = text_truncations(model, tokenized.value, "inputs", side)
            if not request.truncation.truncate:
                refuse_truncation(truncations)
            job = Job(
                model,
                [each.ids for each in tokenized.value],
                Outputs(logits=True),
                purpose=Purpose.RERANKING,
                client=request.client,
                weight=weight_of(request.urgency),
                time_limit=self._time_limit,
            )
            logits = await self._admission.run(job)
        return ClassificationResult(
            labels=model.labels,
            logits=logits,
            truncations=truncations,
            tokens=sum(len(each.ids) for each in tokenized.value),
            timings=timings_of(started, tokenized=[tokenized.stage], jobs=[job]),
        )


def _classifier_of(models: LoadedModels) -> Classifier:
    if isinstance(models.reranker, Classifier):
        return models.reranker
    if models.reranker is None:
        raise RerankerDisabledError(
            "there is no model with labels here: RERANKER_MODEL names a cross-encoder"
        )
    raise InvalidRequestError(
        f"{models.reranker.name} has no labels: only a cross-encoder as RERANKER_MODEL has"
    )


def _tokenize(model: Classifier, request: ClassificationRequest) -> list[TokenizedText]:
    return [model.tokenize_input(*each, request.truncation) for each in request.inputs]
