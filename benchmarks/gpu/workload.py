"""Texts of one length each, for figures in tokens a second."""

from dataclasses import dataclass

from benchmarks.workload import Lengths, draw_texts

LENGTHS = (32, 128, 256, 512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Size:
    """How much one measurement holds: `tokens` in all, in texts of at most `longest` tokens."""

    tokens: int
    longest: int

    def lengths(self) -> list[int]:
        """Those of `LENGTHS` that are measured."""
        return [length for length in LENGTHS if length <= self.longest]

    def texts(self, length: int) -> list[str]:
        """At least one, each of exactly `length` tokens, special ones included."""
        return draw_texts(Lengths(length, length), max(1, self.tokens // length))


FULL = Size(tokens=262_144, longest=8192)
# So that a rehearsal on a CPU ends in time.
QUICK = Size(tokens=2048, longest=512)
