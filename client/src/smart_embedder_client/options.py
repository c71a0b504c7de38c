"""The options of requests: fields of the service's API, under the same names.

docs/api.md describes them. The service has a default for each.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

OnError = Literal["raise", "yield"]
OutputDtype = Literal["float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"]


class EmbedOptions(TypedDict, total=False):
    """The options of `embed`.

    `if_vector_space` takes the ids in `vector_space` of an earlier response. The service refuses a
    request whose vectors could not be compared with those (`vector_space_differs`).
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
    """The weights of bge-m3's three scores in late interaction; each defaults to 1."""

    dense: float
    sparse: float
    colbert: float


class RerankOptions(TypedDict, total=False):
    """The options of `rerank`; for `if_vector_space` see `EmbedOptions`."""

    normalize: bool
    instruction: str | None
    weights: RerankWeights | None
    truncate: bool
    truncation_side: Literal["left", "right"]
    model: str | None
    if_vector_space: Sequence[str] | None
