"""What a request may ask for: the fields of the service's API under their own names.

An option that is left out has the service's default; its documentation says what each one means.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

OnError = Literal["raise", "yield"]
OutputDtype = Literal["float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"]


class EmbedOptions(TypedDict, total=False):
    """The options of `embed`.

    `if_vector_space` has the ids of an earlier answer's `vector_space`: the service then refuses
    to make vectors that may not be compared with those (`vector_space_differs`).
    """

    return_dense: bool
    return_sparse: bool
    return_colbert: bool
    normalize_dense: bool
    dimensions: int | None
    truncate: bool
    truncation_side: Literal["left", "right"]
    prompt: str | None
    prompt_name: str | None
    input_type: Literal["query", "document"] | None
    return_tokens: bool
    output_dtype: OutputDtype
    colbert_pool_factor: int | None
    muvera: Literal["query", "document"] | None
    model: str | None
    if_vector_space: Sequence[str] | None


class RerankWeights(TypedDict, total=False):
    """How much each of bge-m3's scores counts in late interaction; 1 if it is left out."""

    dense: float
    sparse: float
    colbert: float


class RerankOptions(TypedDict, total=False):
    """The options of `rerank`; `if_vector_space` is as in `EmbedOptions`."""

    normalize: bool
    instruction: str | None
    weights: RerankWeights | None
    truncate: bool
    truncation_side: Literal["left", "right"]
    model: str | None
    if_vector_space: Sequence[str] | None
