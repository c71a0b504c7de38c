"""Vector spaces: everything that the values of vectors depend on, and a short id.

Vectors with the same id can be compared with each other. The id does not depend on the machine, the
time, or the number format in which a model is computed.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from smart_embedder.errors import InvalidRequestError, VectorSpaceDiffersError
from smart_embedder.requests import (
    AnyRequest,
    EmbedRequest,
    ExtractRequest,
    TruncationOptions,
)

# Scores have a space too.
SCORE = "score"
VECTORS = ("dense", "sparse", "colbert")
_KINDS = (*VECTORS, SCORE)
UNIT, RAW, NONE = "unit", "raw", "none"
_ENDS = {"right": "end", "left": "start"}
_DIGITS = 12
# The limit of If-Vector-Space; longer than any useful list of ids.
_MAX_CHARACTERS = 2048


@dataclass(frozen=True, slots=True)
class VectorSpace:
    """The facts that the vectors of one kind, or scores, depend on; each is a word or a digest.

    - `weights` is a digest of the transformer's weights and of its configuration, and `projection`
      one of the layers from hidden states to vectors. Both are of numbers, not of files.
    - `tokenizer` is a digest of the tokenizer, and `prompts` one of the model's prompts.
    - `truncation` is the token limit and the end that is cut.
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
        """Return the id: the kind, and 12 hexadecimal digits of a hash of all facts."""
        # `astuple` would take fifty times as long.
        facts = (
            f"{self.kind}-{self.weights}-{self.tokenizer}-{self.pooling}-{self.projection}-"
            f"{self.normalisation}-{self.prompts}-{self.truncation}-{self.dimensions}"
        )
        return f"{self.kind}-{hashlib.sha256(facts.encode()).hexdigest()[:_DIGITS]}"

    def truncated(self, options: TruncationOptions) -> Self:
        """Return the space of texts that are truncated with these options."""
        if options.side == "right" and options.max_tokens is None:
            return self
        limit = self.truncation.removesuffix(_ENDS["right"])
        if options.max_tokens is not None:
            limit = f"{options.max_tokens}of{limit}"
        return replace(self, truncation=limit + _ENDS[options.side])

    def for_request(self, request: AnyRequest) -> Self:
        """Return the space of the vectors in the response to a request.

        The prompt of the request does not matter: queries and documents with different prompts are
        in one space. Pooled ColBERT vectors are in the space of unpooled ones.
        """
        if isinstance(request, ExtractRequest):
            return self
        space = self.truncated(request.truncation)
        if self.kind != "dense" or not isinstance(request, EmbedRequest):
            return space
        if request.normalize_dense and space.normalisation != UNIT:
            space = replace(space, normalisation=UNIT)
        if request.dimensions is not None:
            space = replace(space, dimensions=str(request.dimensions))
        return space


def require_spaces(expected: str, spaces: Mapping[str, str]) -> None:
    """Raise `VectorSpaceDiffersError` unless the ids in `expected` equal those of a response.

    `expected` are ids separated by commas, and `spaces` are the ids of the response by kind. Ids of
    kinds that the response lacks are ignored. Raises `InvalidRequestError` if no id is left, or if
    one has an unknown kind.
    """
    if len(expected) > _MAX_CHARACTERS:
        raise InvalidRequestError(
            f"If-Vector-Space, or if_vector_space, has {len(expected)} characters: send at most "
            f"{_MAX_CHARACTERS}"
        )
    ids = [part.strip() for part in expected.split(",")]
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
