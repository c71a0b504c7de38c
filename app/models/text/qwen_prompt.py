"""Qwen3-Reranker's prompt: the template of its model card, filled in with token ids.

The query is tokenised once and each passage once. Their ids joined are those of the whole prompt:
between the colon and the space before either of them every pre-tokenizer ends a word.
"""

from dataclasses import dataclass

import numpy as np

from app.engine.types import JoinedIds, TokenIds, TokenizedPair
from app.errors import StartupError
from app.models.text.tokenizer import NO_IDS, Beginning, TextTokenizer

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_BEHIND_QUERY = "\n<Document>:"


@dataclass(frozen=True, slots=True)
class Head:
    """What comes before a passage: `tokens` of content, of which `ids` holds what is read.

    The query's tokens are those from `query_start` to `query_stop`; `ids` begins with the prefix.
    """

    ids: TokenIds
    tokens: int
    query_start: int
    query_stop: int


class QwenTemplate:
    """Makes pairs of a query and passages; only what is filled in is cut, from the end."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        fixed = tokenizer.encode_plain([PREFIX, SUFFIX, " ", _BEHIND_QUERY], len(PREFIX))
        self.prefix, self.suffix, self._space, self._behind_query = (text.ids for text in fixed)
        frame = len(self.prefix) + len(self.suffix)
        self._room = tokenizer.max_length - frame
        if self._room < 1:
            raise StartupError(
                f"a length limit of {tokenizer.max_length} tokens leaves no room beside the "
                f"{frame} tokens of the reranker's template"
            )

    def pairs(self, query: str, passages: list[str], instruction: str) -> list[TokenizedPair]:
        """The query with each passage; all that is before a passage counts before it."""
        head = self._head(query, instruction)
        # At least the first token, which tells whether it belongs to the passage.
        room = max(1, self._room - head.tokens)
        ends = self._tokenizer.encode_plain([f" {passage}" for passage in passages], room)
        return [self._pair(head, end) for end in ends]

    def _head(self, query: str, instruction: str) -> Head:
        texts = [f"<Instruct>: {instruction}\n<Query>:", f" {query}{_BEHIND_QUERY}"]
        before, asked = self._tokenizer.encode_plain(texts, self._room)
        content = np.concatenate((before.ids, asked.ids))[: self._room]
        return Head(
            ids=np.concatenate((self.prefix, content)),
            tokens=before.total + asked.total,
            query_start=before.total + self._spaces(asked),
            query_stop=before.total + asked.total - self._tokens_behind(asked),
        )

    def _spaces(self, text: Beginning) -> int:
        """Tokens of the template's space alone; one that reaches into the text is the text's."""
        space = self._space
        return len(space) if np.array_equal(text.ids[:1], space) and len(space) else 0

    def _tokens_behind(self, asked: Beginning) -> int:
        """Tokens behind the query, without a line's end that is one with the query's last token."""
        behind = self._behind_query
        alone = asked.last[-len(behind) :] == behind.tolist()
        return len(behind) if alone else len(behind) - 1

    def _pair(self, head: Head, end: Beginning) -> TokenizedPair:
        before = head.tokens + self._spaces(end)
        kept = min(self._room, head.tokens + end.total)
        room = self._room > head.tokens
        rest = end.take(NO_IDS, self.suffix) if room else self.suffix
        return TokenizedPair(
            sequence=JoinedIds(head.ids, rest),
            query_tokens=head.query_stop - head.query_start,
            query_kept=max(0, min(kept, head.query_stop) - head.query_start),
            passage_tokens=head.tokens + end.total - before,
            passage_kept=max(0, kept - before),
        )
