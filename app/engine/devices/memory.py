"""The token budget of a forward: halved when memory runs out, then slowly restored."""

from app.engine.scheduling.batcher import Limits

_RECOVERY_STEPS = 100


class TokenBudget:
    """The limits of a forward: halved when a batch ran out of memory, then slowly restored."""

    def __init__(
        self, tokens: int, max_sequences: int | None = None, max_requests: int | None = None
    ) -> None:
        self._most = tokens
        self._now = tokens
        self._max_sequences = max_sequences
        self._max_requests = max_requests

    @property
    def limits(self) -> Limits:
        """The limits of the next forward."""
        return Limits(self._now, self._max_sequences, self._max_requests)

    def shrink(self, failed_tokens: int) -> None:
        """Lower the budget to half of `failed_tokens`, which did not fit."""
        self._now = max(1, min(self._now, failed_tokens // 2))

    def recover(self) -> None:
        """Raise the budget by a hundredth of the whole, after a forward that fitted."""
        self._now = min(self._most, self._now + max(1, self._most // _RECOVERY_STEPS))
