"""The space of vectors: an id of all that their numbers depend on, which explains itself.

Vectors of one id can be compared with each other; those of two cannot, or not without a loss. The
id is the same wherever, whenever and in whatever precision a model is computed.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from typing import Self

from smart_embedder.engine.records import EmbedRequest, RerankRequest, TruncationOptions
from smart_embedder.errors import InvalidRequestError, VectorSpaceDiffersError

# Of scores, which have one, too; the others are kinds of vectors.
SCORE = "score"
VECTORS = ("dense", "sparse", "colbert")
_KINDS = (*VECTORS, SCORE)
UNIT, RAW, NONE = "unit", "raw", "none"
_PART = re.compile(r"[a-z0-9_+.]{1,64}")
_ENDS = {"right": "end", "left": "start"}
# Longer than any list of ids that a client has a use for.
_MOST_CHARACTERS = 2048


@dataclass(frozen=True, slots=True)
class VectorSpace:
    """What vectors, or scores, of one kind depend on; each part is a word or a digest.

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
        # Not `astuple`, which takes fifty times as long.
        return (
            f"{self.kind}-{self.weights}-{self.tokenizer}-{self.pooling}-{self.projection}-"
            f"{self.normalisation}-{self.prompts}-{self.truncation}-{self.dimensions}"
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The space of an id; raises `InvalidRequestError` where it is none."""
        parts = text.strip().split("-")
        is_id = len(parts) == len(fields(cls)) and all(map(_PART.fullmatch, parts))
        if not is_id or parts[0] not in _KINDS:
            raise InvalidRequestError(
                "If-Vector-Space, or if_vector_space, holds what is no id of a vector space: send "
                "those of an answer's Vector-Space, separated by commas"
            )
        return cls(*parts)

    def differences(self, other: Self) -> str:
        """What the other one had: `pooling: cls, was mean; dimensions: 512, was 1024`."""
        names = (each.name for each in fields(self))
        pairs = zip(names, astuple(self), astuple(other), strict=True)
        return "; ".join(f"{name}: {own}, was {was}" for name, own, was in pairs if own != was)

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


def parse_spaces(text: str) -> list[VectorSpace]:
    """The spaces of ids that are separated by commas; raises `InvalidRequestError`."""
    if len(text) > _MOST_CHARACTERS:
        raise InvalidRequestError(
            f"If-Vector-Space, or if_vector_space, has {len(text)} characters: send at most "
            f"{_MOST_CHARACTERS}"
        )
    return [VectorSpace.parse(each) for each in text.split(",")]


def require_spaces(
    wanted: Iterable[VectorSpace],
    spaces: Mapping[str, VectorSpace],
    those: str = "those that If-Vector-Space names",
) -> None:
    """Raise `VectorSpaceDiffersError` unless each of the `spaces`, by kind, is the wanted one.

    Wanted ones of kinds that an answer has not are left out, unless it has none of them. `those`
    are the vectors whose spaces are wanted.
    """
    wanted = list(wanted)
    compared = [(spaces[each.kind], each) for each in wanted if each.kind in spaces]
    if wanted and not compared:
        raise InvalidRequestError(
            f"If-Vector-Space names spaces of {', '.join(each.kind for each in wanted)}, and this "
            f"answer has {', '.join(spaces) or 'no vectors of a known space'}: leave it out"
        )
    differing = [(own, was) for own, was in compared if own != was]
    if differing:
        raise VectorSpaceDiffersError(
            f"the vectors here are of another space than {those}: "
            + "; ".join(
                f"{own.kind}: {own.differences(was)} (here {own}, wanted {was})"
                for own, was in differing
            )
        )
