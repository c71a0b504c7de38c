"""How many tokens one forward may hold just now."""

from app.engine.batcher import Limits

_RECOVERY_STEPS = 100


class TokenBudget:
    """Shrinks when a batch did not fit the device's memory, and grows back step by step."""

    def __init__(
        self, tokens: int, max_sequences: int | None = None, max_requests: int | None = None
    ) -> None:
        self._most = tokens
        self._now = tokens
        self._max_sequences = max_sequences
        self._max_requests = max_requests

    @property
    def limits(self) -> Limits:
        """What the next forward may hold."""
        return Limits(self._now, self._max_sequences, self._max_requests)

    def shrink(self, failed_tokens: int) -> None:
        """Stay at half of what was too much."""
        self._now = max(1, min(self._now, failed_tokens // 2))

    def recover(self) -> None:
        """After a forward that fitted: a hundredth of the way back to the whole budget."""
        self._now = min(self._most, self._now + max(1, self._most // _RECOVERY_STEPS))
