"""The models' interface, as the engine calls it; `app.models` implements it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from app.engine.options import CUT_AT_END, InputType, TruncationOptions
from app.engine.types import (
    Outputs,
    SpecialToken,
    TokenIds,
    TokenizedPair,
    TokenizedText,
    TokenSpans,
)


class Model(Protocol):
    """A loaded model as the device thread sees it."""

    @property
    def name(self) -> str:
        """The name that answers carry."""

    @property
    def max_length(self) -> int:
        """The most tokens of one sequence, special tokens included."""

    @property
    def max_batch_sequences(self) -> int | None:
        """The most sequences in one forward; None for no limit."""

    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], Sequence[Any]]:
        """Launch the forward of one batch, in the device thread, with `outputs` of each sequence.

        Returns a function that waits for the forward, in any thread, and returns a result for each
        sequence, in order. The result is an `InferenceError` for a sequence that has made a number
        that is not finite.
        """

    @property
    def special_tokens(self) -> tuple[list[SpecialToken], list[SpecialToken]]:
        """The special tokens before, and those after, every text."""

    def token_spans(self, text: str) -> Iterator[TokenSpans]:
        """The tokens of a whole text, slice by slice; safe to call from several threads."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of these tokens; ids outside the vocabulary are left out."""


class Embedder(Model, Protocol):
    """A model whose results are `TextEmbedding`s, with None for kinds not asked for or not made."""

    @property
    def kinds(self) -> Outputs:
        """The kinds of vectors that it makes."""

    @property
    def colbert_width(self) -> int:
        """Numbers in each ColBERT vector; 0 where it makes none."""

    @property
    def dense_width(self) -> int:
        """Numbers in a dense vector."""

    @property
    def states_width(self) -> int:
        """Numbers in a hidden state."""

    @property
    def pooling(self) -> str:
        """How the hidden states become a dense vector, such as `cls` or `mean`."""

    @property
    def normalizes(self) -> bool:
        """Whether its dense vectors always have unit length."""

    @property
    def min_dimensions(self) -> int | None:
        """The fewest dimensions that it was trained for; None if it was trained for all only."""

    @property
    def prompts(self) -> Mapping[str, str]:
        """Its prompts by name, from its sentence-transformers configuration."""

    @property
    def reads_input_type(self) -> bool:
        """Whether it reads queries and documents differently, apart from their prompts."""

    @property
    def default_prompt(self) -> str:
        """The prompt of requests that name none."""

    def tokenize(
        self,
        texts: list[str],
        prompt: str = "",
        truncation: TruncationOptions = CUT_AT_END,
        input_type: InputType | None = None,
    ) -> list[TokenizedText]:
        """Token ids of each text behind `prompt`; safe to call from several threads."""

    def colbert_tokens(self, ids: TokenIds) -> TokenIds:
        """The token behind each ColBERT vector of the sequence `ids`."""

    def token_strings(self, ids: TokenIds) -> list[str]:
        """The strings of these tokens in the vocabulary."""


class Reranker(Model, Protocol):
    """A model whose results are scores."""

    @property
    def reads_instruction(self) -> bool:
        """Whether it reads an instruction."""

    @property
    def scores_are_logits(self) -> bool:
        """Whether its scores are logits, whose sigmoid is a probability."""

    @property
    def refusal(self) -> str | None:
        """Why it cannot score passages, if it cannot: a classifier may have no label for that."""

    def tokenize_pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Token ids of the query with each passage; safe to call from several threads."""


@runtime_checkable
class Classifier(Model, Protocol):
    """A model whose results are `[labels]` float32 logits where `Outputs.logits` asks for them."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of each logit."""

    def tokenize_input(
        self, text: str, other: str | None, truncation: TruncationOptions = CUT_AT_END
    ) -> TokenizedText:
        """Token ids of a text alone, or of two together; safe to call from several threads."""
