"""Qwen3-Reranker's prompt: the template of its model card, filled in with token ids.

The query and each passage are tokenised once. Joined, their ids are those of the whole prompt,
because every pre-tokenizer ends a word between the colon and the space before them.
"""

from dataclasses import dataclass

import numpy as np

from app.engine.options import CUT_AT_END, TruncationOptions
from app.engine.types import JoinedIds, TokenIds, TokenizedPair
from app.errors import StartupError
from app.models.text.template import NO_IDS
from app.models.text.tokenizer import TextTokenizer, TruncatedTokens

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_BEHIND_QUERY = "\n<Document>:"


@dataclass(frozen=True, slots=True)
class PromptHead:
    """The part before a passage: `tokens` of content, of which `ids` holds those that are read.

    The query's tokens are those from `query_start` to `query_stop`; `ids` begins with the prefix.
    Where not `exact`, the counts are lower bounds.
    """

    ids: TokenIds
    tokens: int
    query_start: int
    query_stop: int
    exact: bool = True


class QwenTemplate:
    """Makes pairs of a query and passages; only the content is cut, not the template."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        fixed = tokenizer.encode_plain([PREFIX, SUFFIX, " ", _BEHIND_QUERY], len(PREFIX))
        self.prefix, self.suffix, self._space, self._behind_query = (text.ids for text in fixed)
        frame = len(self.prefix) + len(self.suffix)
        self._limit = tokenizer.max_length - frame
        if self._limit < 1:
            raise StartupError(
                f"a length limit of {tokenizer.max_length} tokens leaves no room beside the "
                f"{frame} tokens of the reranker's template"
            )

    def pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """The query with each passage; the part before a passage is cut only after the passage."""
        head = self._head(query, instruction)
        limit = max(0, self._limit - head.tokens)
        if truncation.max_tokens is not None:
            limit = min(limit, truncation.max_tokens)
        texts = [f" {passage}" for passage in passages]
        ends = self._tokenizer.encode_plain(texts, limit, truncation.side)
        return [self._pair(head, end) for end in ends]

    def _head(self, query: str, instruction: str) -> PromptHead:
        texts = [f"<Instruct>: {instruction}\n<Query>:", f" {query}{_BEHIND_QUERY}"]
        before, query_tokens = self._tokenizer.encode_plain(texts, self._limit)
        content = np.concatenate((before.ids, query_tokens.ids))[: self._limit]
        return PromptHead(
            ids=np.concatenate((self.prefix, content)),
            tokens=before.total + query_tokens.total,
            exact=before.exact and query_tokens.exact,
            query_start=before.total + self._spaces(query_tokens),
            query_stop=before.total + query_tokens.total - self._tokens_behind(query_tokens),
        )

    def _spaces(self, text: TruncatedTokens) -> int:
        """Tokens of the template's space; none where it is part of the text's first token."""
        space = self._space
        return len(space) if text.first[: len(space)] == space.tolist() and len(space) else 0

    def _tokens_behind(self, query_tokens: TruncatedTokens) -> int:
        """Tokens behind the query, without a line's end that is one with the query's last token."""
        behind = self._behind_query
        if not query_tokens.exact:
            return 0
        alone = query_tokens.last[-len(behind) :] == behind.tolist()
        return len(behind) if alone else len(behind) - 1

    def _pair(self, head: PromptHead, end: TruncatedTokens) -> TokenizedPair:
        spaces = self._spaces(end)
        # Where the passage is cut from the left, the template's space is the first to go.
        spaces_kept = 0 if end.side == "left" and end.total > end.kept else spaces
        kept = min(self._limit, head.tokens + end.total)
        return TokenizedPair(
            sequence=JoinedIds(head.ids, end.take(NO_IDS, self.suffix)),
            query_tokens=head.query_stop - head.query_start,
            query_kept=max(0, min(kept, head.query_stop) - head.query_start),
            passage_tokens=end.total - spaces,
            passage_kept=max(0, end.kept - spaces_kept),
            query_exact=head.exact,
            passage_exact=end.exact,
        )
