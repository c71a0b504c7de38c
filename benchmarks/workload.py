"""Seeded workloads whose lengths are known in tokens, and turns on them."""

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
    """Texts that engines are compared on.

    `largest_batch` is the most texts that a peer is tried with in one forward: with long documents
    a second one in the batch only adds padding. With `one_at_a_time` each text waits for the one
    before it, as a single user's queries do. Slow engines are spared `heavy` texts.
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
    """`count` texts for the tokenizer of `benchmarks.checkpoints`, where a word is one token."""
    rng = random.Random(seed)
    low, high = math.log(lengths.shortest), math.log(lengths.longest)
    # The first syllable of a word is taken from the first third, for which the vocabulary holds
    # every word of three syllables.
    firsts = SYLLABLES[: len(SYLLABLES) // 3]
    texts = []
    for _ in range(count):
        # Two of the tokens are the special ones around the text.
        words = round(math.exp(rng.uniform(low, high))) - 2
        drawn = (rng.choice(firsts) + "".join(rng.choices(SYLLABLES, k=2)) for _ in range(words))
        texts.append(" ".join(drawn))
    return texts


def turns(rounds: Mapping[Name, int]) -> Iterator[Name]:
    """Names in the order A B C A B C, since a shared machine's speed drifts.

    One leaves when its rounds are over.
    """
    for number in range(max(rounds.values(), default=0)):
        for name, wanted in rounds.items():
            if number < wanted:
                yield name
