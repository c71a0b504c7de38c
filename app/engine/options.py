"""What a request may ask for beside kinds of vectors: how texts are read, what is made of vectors.

An endpoint translates its own fields into these records and passes them to `Engine.embed` or in a
`RerankRequest`. The engine refuses what has no effect on the loaded models with an
`InvalidRequestError` (`app.engine.option_checks`), so an endpoint whose clients always send some
field passes it on only where it means something: `LoadedModels.dense_model` tells what a model can.
"""

from dataclasses import dataclass
from typing import Literal

Side = Literal["left", "right"]
InputType = Literal["query", "document"]

# A prompt is tokenised with each text.
MAX_PROMPT_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class TruncationOptions:
    """What is done with a text that has more tokens than its model reads.

    It is cut from `side`, `left` being its beginning; special tokens and a prompt stay. Without
    `truncate` the request is refused with a `TextTooLongError` instead. `max_tokens` lowers the
    limit of a text, its special tokens not counted. In reranking a query is always cut from the
    right, and `side` and `max_tokens` are for the passages.
    """

    truncate: bool = True
    side: Side = "right"
    max_tokens: int | None = None


CUT_AT_END = TruncationOptions()


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """How the texts of an embedding request are read, and what its answer holds.

    - `truncation`: applies to every model that reads the texts.
    - `prompt`, `prompt_name`, `input_type`: at most one of them. The text before each text, or a
      name of it in the model's sentence-transformers configuration, or what the texts are, for
      which that configuration has a prompt. It is for the model that makes the dense vector, and
      so for bge-m3's other vectors only where bge-m3 makes the dense one, too.
    - `dimensions`: the first so many numbers of the dense vector, scaled to unit length.
    - `return_tokens`: whether `EmbeddingResult.token_strings` is wanted.
    """

    truncation: TruncationOptions = CUT_AT_END
    prompt: str | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    dimensions: int | None = None
    return_tokens: bool = False


NO_OPTIONS = EmbeddingOptions()
