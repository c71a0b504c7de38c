"""What requests for scores have in common: their options, their limits and their jobs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.engine.admission.admission import Admission
from app.engine.admission.concurrency import ConcurrencyLimit
from app.engine.admission.truncation import refuse_truncation
from app.engine.answer_memory import UNLIMITED, AnswerMemory
from app.engine.model import Model
from app.engine.options import CUT_AT_END, TruncationOptions
from app.engine.scheduling.batcher import DEFAULT_URGENCY, weight_of
from app.engine.scheduling.job import Job, Purpose
from app.engine.types import Outputs, TokenSequence, Truncation


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequest:
    """The options of every request for scores; all but `truncation` are as in `Engine.embed`."""

    truncation: TruncationOptions = CUT_AT_END
    urgency: int = DEFAULT_URGENCY
    client: str = ""
    model: str | None = None
    answer: AnswerMemory = UNLIMITED

    def check_truncations(self, truncations: list[Truncation]) -> None:
        """Raise `TextTooLongError` if a text was truncated and the options forbid it."""
        if not self.truncation.truncate:
            refuse_truncation(truncations)


class ScoringPipeline:
    """Runs the requests that `limit` admits; the forwards of one may take `time_limit` seconds."""

    def __init__(self, admission: Admission, limit: ConcurrencyLimit, time_limit: float) -> None:
        self._admission = admission
        self._limit = limit
        self._time_limit = time_limit

    def _job(
        self,
        model: Model,
        sequences: Sequence[TokenSequence],
        outputs: Outputs,
        request: ScoringRequest,
        *,
        time_spent: float = 0.0,
        reduce: Callable[[int, Any], Any] | None = None,
    ) -> Job:
        return Job(
            model,
            sequences,
            outputs,
            purpose=Purpose.RERANKING,
            client=request.client,
            weight=weight_of(request.urgency),
            time_limit=self._time_limit,
            time_spent=time_spent,
            reduce=reduce,
        )
