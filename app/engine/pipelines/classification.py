"""Classification requests: the logits of a classifier's labels for texts or pairs of texts."""

from dataclasses import dataclass
from functools import partial

from app.engine import clock
from app.engine.admission.admission import timings_of
from app.engine.admission.truncation import text_truncations
from app.engine.forwards.forwards import TOKEN_ID_BYTES
from app.engine.loaded_models import LoadedModels
from app.engine.model import Classifier
from app.engine.pipelines.scoring import ScoringPipeline, ScoringRequest
from app.engine.types import ClassificationResult, Outputs, TokenizedText
from app.errors import InvalidRequestError, RerankerDisabledError

_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class ClassificationRequest(ScoringRequest):
    """Texts to classify, each alone or with a second one."""

    inputs: list[tuple[str, str | None]]

    @property
    def texts(self) -> list[str]:
        """Every text."""
        return [text for pair in self.inputs for text in pair if text is not None]


class ClassificationPipeline(ScoringPipeline):
    """Runs classification requests, within the same limits as rerank requests."""

    async def run(
        self, models: LoadedModels, request: ClassificationRequest
    ) -> ClassificationResult:
        """The logits of every input; raises `InvalidRequestError` where no model has labels."""
        model = _classifier_of(models)
        async with self._limit.hold(request.client):
            started = clock.now()
            call = partial(_tokenize, model, request)
            texts = await self._admission.tokenize(model, call, request.texts, request.client)
            side = request.truncation.side
            truncations = text_truncations(model, texts.value, "inputs", side)
            request.check_truncations(truncations)
            sequences = [text.ids for text in texts.value]
            size = TOKEN_ID_BYTES * sum(map(len, sequences))
            size += _LOGIT_BYTES * len(model.labels) * len(sequences)
            what = f"the labels of these {len(sequences)} inputs"
            request.answer.need(size, what, "send fewer inputs or shorter ones")
            job = self._job(model, sequences, Outputs(logits=True), request)
            logits = await self._admission.run(job)
        return ClassificationResult(
            labels=model.labels,
            logits=logits,
            truncations=truncations,
            tokens=sum(map(len, sequences)),
            timings=timings_of(started, tokenized=[texts.stage], jobs=[job]),
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
