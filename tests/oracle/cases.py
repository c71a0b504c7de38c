"""Draws requests from a seed: 1 to 64 texts of 1 to 2,000 words, all combinations of options.

A word is one token for the tokenizers of the tiny bge-m3 and bge-reranker checkpoints, and about
three for Qwen's.
"""

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.checkpoints import WORDS
from tests.support.texts import ODD_TEXTS

MOST_TEXTS = 64
MOST_WORDS = 2000
ODD_SHARE = 0.1
KINDS = ("dense", "sparse", "colbert")
_KINDS_REQUESTED = [flags for flags in itertools.product([True, False], repeat=3) if any(flags)]
_EMBED_OPTIONS = list(itertools.product(_KINDS_REQUESTED, [False, True], [False, True]))

Body = dict[str, object]


@dataclass(frozen=True, slots=True)
class Case:
    """A request that a server answers with 200; `number` identifies it."""

    number: int
    path: str
    body: Body

    @property
    def content(self) -> bytes:
        return json.dumps(self.body).encode()


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request that a server must refuse with `status`."""

    path: str
    content: bytes
    status: int


MALFORMED = (
    Malformed("/embeddings/", b"", 422),
    Malformed("/embeddings/", b"{", 422),
    Malformed("/embeddings/", b'{"sentences":[]}', 400),
    Malformed("/embeddings/", b'{"sentences":["a",1]}', 422),
    Malformed("/embeddings/", b'{"sentences":["a"],"dense":true}', 422),
    Malformed("/embeddings/", b'{"sentences":["\xff"]}', 422),
    Malformed("/rerank", b'{"query":"a"}', 422),
    Malformed("/rerank", b'{"query":" ","passages":["a"]}', 400),
    Malformed("/rerank", b'{"query":"a","passages":[]}', 400),
    Malformed("/rerank", b'{"query":"a","passages":["b"],"normalize":"x"}', 422),
)


def draw_cases(seed: int, count: int, rerank_options: Sequence[Body], words: int) -> list[Case]:
    """Draw `count` requests, two thirds of them to embed.

    A request of several texts has at most about `words` words; its query counts per passage.
    """
    rng = random.Random(seed)
    embed, rerank = itertools.cycle(_EMBED_OPTIONS), itertools.cycle(rerank_options)
    return [
        _draw_rerank(rng, number, next(rerank), words)
        if number % 3 == 2
        else _draw_embed(rng, number, next(embed), words)
        for number in range(count)
    ]


def _draw_embed(
    rng: random.Random, number: int, options: tuple[tuple[bool, ...], bool, bool], words: int
) -> Case:
    flags, normalize, as_indices = options
    body: Body = {f"return_{kind}": flag for kind, flag in zip(KINDS, flags, strict=True)}
    body |= {"normalize_dense": normalize, "sparse_as_indices": as_indices}
    return Case(number, "/embeddings/", body | {"sentences": _draw_texts(rng, words)})


def _draw_rerank(rng: random.Random, number: int, options: Body, words: int) -> Case:
    passages = _draw_texts(rng, words)
    query = draw_text(rng, log_uniform(rng, max(1, words // len(passages))))
    body: Body = {"query": query, "passages": passages}
    return Case(number, "/rerank", body | options)


def _draw_texts(rng: random.Random, words: int) -> list[str]:
    lengths = [log_uniform(rng, MOST_WORDS) for _ in range(log_uniform(rng, MOST_TEXTS))]
    shrink = min(1.0, words / sum(lengths)) if len(lengths) > 1 else 1.0
    texts = [draw_text(rng, max(1, int(length * shrink))) for length in lengths]
    odd = [rng.choice(ODD_TEXTS) if rng.random() < ODD_SHARE else text for text in texts]
    # Equal texts share a prefix, which some models compute once.
    return [*odd[:-1], odd[0]] if rng.random() < ODD_SHARE else odd


def draw_text(rng: random.Random, words: int) -> str:
    """Draw this many random words."""
    return " ".join(rng.choices(WORDS, k=words))


def log_uniform(rng: random.Random, most: int) -> int:
    """Draw a number from 1 to `most`, small ones more often."""
    return round(math.exp(rng.uniform(0.0, math.log(most))))
