"""The space of vectors: everything that their numbers depend on, and a short id of it.

Vectors of one id can be compared with each other; those of two cannot, or not without a loss. The
id is the same wherever, whenever and in whatever number format a model is computed.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from smart_embedder.errors import InvalidRequestError, VectorSpaceDiffersError
from smart_embedder.requests import EmbedRequest, RerankRequest, TruncationOptions

# Of scores, which have one, too; the others are kinds of vectors.
SCORE = "score"
VECTORS = ("dense", "sparse", "colbert")
_KINDS = (*VECTORS, SCORE)
UNIT, RAW, NONE = "unit", "raw", "none"
_ENDS = {"right": "end", "left": "start"}
_DIGITS = 12
# Longer than any list of ids that a client has a use for.
_MOST_CHARACTERS = 2048


@dataclass(frozen=True, slots=True)
class VectorSpace:
    """The facts that vectors, or scores, of one kind depend on; each is a word or a digest.

    - `weights` are those of the transformer, with what its configuration says of them; `projection`
      is what follows, from states to vectors. Both are of the numbers, and not of files.
    - `tokenizer` is how texts become tokens, and `prompts` are those that the model brings.
    - `truncation` is the most tokens that are read, and the end that is cut.
    - `normalisation` is `unit` for vectors of unit length, otherwise `raw`.
    """

    kind: str
    weights: str
    tokenizer: str
    pooling: str
    projection: str
    normalisation: str
    prompts: str
    truncation: str
    dimensions: str

    def __str__(self) -> str:
        """The id: the kind, and 12 hexadecimal digits of a hash of all facts."""
        # Not `astuple`, which takes fifty times as long.
        facts = (
            f"{self.kind}-{self.weights}-{self.tokenizer}-{self.pooling}-{self.projection}-"
            f"{self.normalisation}-{self.prompts}-{self.truncation}-{self.dimensions}"
        )
        return f"{self.kind}-{hashlib.sha256(facts.encode()).hexdigest()[:_DIGITS]}"

    def truncated(self, options: TruncationOptions) -> Self:
        """The space of texts that are cut in this way."""
        if options.side == "right" and options.max_tokens is None:
            return self
        limit = self.truncation.removesuffix(_ENDS["right"])
        if options.max_tokens is not None:
            limit = f"{options.max_tokens}of{limit}"
        return replace(self, truncation=limit + _ENDS[options.side])

    def of(self, request: EmbedRequest | RerankRequest) -> Self:
        """The space of the vectors in the answer to a request.

        A prompt that it names is no part of it: queries and documents, with prompts of their own,
        are of one space. Neither are ColBERT vectors that are pooled of another.
        """
        space = self.truncated(request.truncation)
        if self.kind != "dense" or not isinstance(request, EmbedRequest):
            return space
        if request.normalize_dense and space.normalisation != UNIT:
            space = replace(space, normalisation=UNIT)
        if request.dimensions is not None:
            space = replace(space, dimensions=str(request.dimensions))
        return space


def require_spaces(wanted: str, spaces: Mapping[str, str]) -> None:
    """Raise `VectorSpaceDiffersError` unless the ids of an answer, by kind, are the wanted ones.

    Commas separate the wanted ids. An id of a kind that the answer lacks is ignored; where no id
    is left, or one is of no kind, it raises `InvalidRequestError`.
    """
    if len(wanted) > _MOST_CHARACTERS:
        raise InvalidRequestError(
            f"If-Vector-Space, or if_vector_space, has {len(wanted)} characters: send at most "
            f"{_MOST_CHARACTERS}"
        )
    ids = [part.strip() for part in wanted.split(",")]
    kinds = [id_.partition("-")[0] for id_ in ids]
    for id_, kind in zip(ids, kinds, strict=True):
        if kind not in _KINDS:
            raise InvalidRequestError(
                f"If-Vector-Space, or if_vector_space, holds {id_!r}, which is no id of a vector "
                "space: send those of an answer's Vector-Space, separated by commas"
            )
    compared = [(id_, spaces[kind]) for id_, kind in zip(ids, kinds, strict=True) if kind in spaces]
    if not compared:
        raise InvalidRequestError(
            f"If-Vector-Space names spaces of {', '.join(kinds)}, and this answer has "
            f"{', '.join(spaces) or 'no vectors of a known space'}: leave it out"
        )
    differing = [(id_, here) for id_, here in compared if id_ != here]
    if any(id_.count("-") > 1 for id_, _ in differing):
        raise VectorSpaceDiffersError(
            "If-Vector-Space names a long id of an earlier version, and ids are short now: "
            + "; ".join(f"{here} here, wanted {id_}" for id_, here in differing)
            + ". If your vectors are of the same model and settings, keep the short id in its "
            "place; otherwise embed your texts anew"
        )
    if differing:
        raise VectorSpaceDiffersError(
            "the vectors here are of another space than those that If-Vector-Space names: "
            + "; ".join(f"{here} here, wanted {id_}" for id_, here in differing)
        )
