"""How fast the device works, as it was seen to."""

from dataclasses import dataclass


@dataclass(slots=True)
class ServiceRate:
    """A running mean of how fast the device works off tokens."""

    tokens_per_second: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take one forward into account."""
        now = tokens / max(seconds, 1e-9)
        last = self.tokens_per_second or now
        self.tokens_per_second = 0.8 * last + 0.2 * now
