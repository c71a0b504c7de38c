"""The options of a request: how its texts are read, and what is done with their vectors.

An endpoint translates its own fields into these records. `app.engine.option_checks` refuses an
option that has no effect on the loaded models with an `InvalidRequestError`; only the type of texts
may be said to every model.
"""

from dataclasses import dataclass
from typing import Literal

Side = Literal["left", "right"]
InputType = Literal["query", "document"]


@dataclass(frozen=True, slots=True)
class TruncationOptions:
    """How a text with more tokens than its model reads is truncated.

    Tokens are cut from `side`, where `left` is the beginning; special tokens and a prompt are kept.
    Without `truncate` the request is refused with a `TextTooLongError` instead. `max_tokens` lowers
    the limit of a text, not counting special tokens. In reranking, `side` and `max_tokens` apply to
    the passages; a query is always cut from the right.
    """

    truncate: bool = True
    side: Side = "right"
    max_tokens: int | None = None


CUT_AT_END = TruncationOptions()


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """How the texts of an embedding request are read, and what its result holds.

    - `truncation` applies to every model that reads the texts.
    - `prompt`, `prompt_name` and `input_type` choose the prompt that is read before each text; at
      most one of them may be set. `prompt` is the text itself, `prompt_name` its name in the
      model's sentence-transformers configuration, and `input_type` the type of the texts, for which
      that configuration may have a prompt; every model takes it. Only the model that makes dense
      vectors reads a prompt.
    - `preferred_prompts` are names of prompts that suit the texts better than that of their
      `input_type`; the first that the model has is read.
    - `dimensions` keeps the first so many numbers of a dense vector. They are scaled to unit length
      if the whole vector is.
    - `return_tokens` asks for `EmbeddingResult.token_strings`.
    """

    truncation: TruncationOptions = CUT_AT_END
    prompt: str | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    preferred_prompts: tuple[str, ...] = ()
    dimensions: int | None = None
    return_tokens: bool = False


NO_OPTIONS = EmbeddingOptions()
