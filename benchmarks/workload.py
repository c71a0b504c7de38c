"""Random texts of known lengths in tokens, and the order of rounds."""

import math
import random
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)

SYLLABLES = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts drawn log-uniformly from `shortest` to `longest`."""

    shortest: int
    longest: int


MIXED = Lengths(16, 500)
QUERIES = Lengths(8, 32)
DOCUMENTS = Lengths(1000, 8000)
PASSAGES = Lengths(20, 300)


@dataclass(frozen=True, slots=True)
class Workload:
    """The texts of a comparison.

    Peers are tried with batches of up to `largest_batch` texts: with long documents, a second one
    only adds padding. With `one_at_a_time` each text is one call, as with the queries of a single
    user. Slow engines skip `heavy` workloads.
    """

    lengths: Lengths
    texts: int
    largest_batch: int
    one_at_a_time: bool = False
    heavy: bool = False


WORKLOADS = {
    "mixed": Workload(MIXED, texts=64, largest_batch=8),
    "queries": Workload(QUERIES, texts=256, largest_batch=32),
    "one-query": Workload(QUERIES, texts=64, largest_batch=1, one_at_a_time=True),
    "documents": Workload(DOCUMENTS, texts=4, largest_batch=1, heavy=True),
}


def draw_texts(lengths: Lengths, count: int, seed: int = 0) -> list[str]:
    """Draw `count` texts for the tokenizer of `benchmarks.checkpoints`, where a word is a token."""
    rng = random.Random(seed)
    low, high = math.log(lengths.shortest), math.log(lengths.longest)
    # The first syllable is from the first third, for which the vocabulary has all words of three
    # syllables.
    firsts = SYLLABLES[: len(SYLLABLES) // 3]
    texts = []
    for _ in range(count):
        # Two tokens are special.
        words = round(math.exp(rng.uniform(low, high))) - 2
        drawn = (rng.choice(firsts) + "".join(rng.choices(SYLLABLES, k=2)) for _ in range(words))
        texts.append(" ".join(drawn))
    return texts


def alternate(rounds: Mapping[Name, int]) -> Iterator[Name]:
    """Yield names in the order A B C A B C, because the speed of a shared machine drifts.

    A name leaves the order after its number of rounds.
    """
    for number in range(max(rounds.values(), default=0)):
        for name, limit in rounds.items():
            if number < limit:
                yield name
